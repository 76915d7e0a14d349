"""Check the nodes of a job before training: one process on each node, started by srun or torchrun.

srun --ntasks-per-node=1 .venv/bin/python tools/preflight.py --config CONFIG.yaml [section.key=value ...]
torchrun --nnodes 2 --nproc-per-node 1 --master-addr n1 tools/preflight.py --config CONFIG.yaml

Compares versions, code and configuration, and checks disks, limits, GPUs, clocks, and the bandwidth between
pairs of nodes. The last line, `exclude: n3,n7`, is for `sbatch --exclude`. Exit code: 0 if all is well, 1 for
a bad node, 2 for a mistake that concerns all nodes.
"""

import argparse
import os
import socket
import sys
import threading
from pathlib import Path

from megamoe.apps.command import parser_of
from megamoe.compat.startup import configure_libraries
from megamoe.config import load_config
from megamoe.errors import ExitCode, UserError
from megamoe.redaction import line_of

LIMIT_S = 100.0  # after which the process ends, whatever it waits for; each wait of its own is shorter
BYTES_OF_PARAMETER = 12  # in a checkpoint: fp32 weight and both moments of Adam


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; return the exit code."""
    parser = parser_of(__doc__)
    add, slow = parser.add_argument, "a slow node has below F x the median bandwidth"
    add("--config", required=True, help="the run's YAML")
    add("overrides", nargs="*", metavar="section.key=value")
    add("--rounds", type=int, default=8, metavar="N", help="pairs of each node (default 8)")
    add("--slow", type=float, default=0.5, metavar="F", help=slow)
    options = parser.parse_intermixed_args(arguments)
    try:
        return _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.MISTAKE
    except (RuntimeError, OSError) as error:
        first = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"
        text = f"{first} cannot be reached from {socket.gethostname()}: {line_of(error)[:200]}"
        print(f"error: {text}", file=sys.stderr)
        return ExitCode.UNEXPECTED


def _run(options: argparse.Namespace) -> int:
    configure_libraries()
    import torch

    from megamoe.apps.cluster.checks import compute_problems, node_problems
    from megamoe.apps.cluster.preflight import Preflight
    from megamoe.model.size import model_size
    from megamoe.parallel.launch import find_world
    from megamoe.train.rank_facts import facts_of_start

    timer = threading.Timer(LIMIT_S, _give_up)  # from here: the imports may be slow on a busy file system
    timer.daemon = True
    timer.start()
    config = load_config(options.config, options.overrides)
    if options.rounds < 0:
        raise UserError(f"--rounds: found {options.rounds}, expected 0 or more")
    world = find_world()
    size = model_size(config, config.model.vocab_size or 0)
    output = Path(config.output).absolute()
    ranks = world.size * max(1, torch.cuda.device_count())  # here one process of each node
    problems = [*node_problems(output, BYTES_OF_PARAMETER * size.total, ranks), *compute_problems()]
    facts = facts_of_start(config, world)
    outcome = Preflight(world, facts, problems, output, options.rounds, options.slow).run()
    if world.is_first:
        for pair, (reduce, exchange) in sorted(outcome.speeds.items()):
            print(f"{pair}: all-reduce {reduce:.2f} GB/s, all-to-all {exchange:.2f} GB/s")
        for line in outcome.mistake:
            print(f"error: on all nodes: {line}")
        for node, lines in outcome.bad.items():
            print("\n".join(f"bad node {node}: {line}" for line in lines))
        print(f"preflight: {outcome.nodes - len(outcome.bad)} of {outcome.nodes} nodes are well")
        if outcome.bad:
            print(f"exclude: {','.join(outcome.bad)}")
    return outcome.code


def _give_up() -> None:
    sys.stderr.write(f"error: {socket.gethostname()}: the checks did not end within {LIMIT_S:.0f} s\n")
    sys.stderr.flush()
    os._exit(ExitCode.UNEXPECTED)
