"""Plan a run on a cluster without any GPU: memory, traffic between GPUs, and the time of a step.

python tools/plan.py --config benchmarks/rooflines/models/moe_1b.yaml --nodes 1 --gpus-per-node 8 --gpu h100
python tools/plan.py --config FILE --nodes 2 --gpus-per-node 8 --gpu h200 --json plan.json parallel.expert=16
python tools/plan.py --config FILE --nodes 2 --gpus-per-node 8 --search     # which layout is the fastest?

One rank's shard of the real model trains two steps on tensors without data, by the code of training. What
training would refuse is refused here, with the same line and exit code 2. Times are a model's: every
assumption is printed. A device that is in no table is a JSON file of its rates, see docs/scale/plan.md.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

from megamoe.apps.command import check_options, parser_of, run_tool, write_text
from megamoe.apps.plan import cuda_device
from megamoe.errors import UserError

MOST_GPUS = 1 << 17  # every process group of the run is made, one after the other


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the run's YAML")
    add("--nodes", type=int, required=True, metavar="N")
    add("--gpus-per-node", type=int, required=True, metavar="G")
    add("--gpu", default="h100", help="h100, h200, b200, a100, mi300x, or a JSON file")
    add("--load", type=float, default=1.0, help="rows of the fullest rank over the mean")
    add("--assumptions", metavar="FILE", help="measured rates, as make gpu-check writes them")
    add("--search", action="store_true", help="rank the layouts that fit, then plan the first")
    add("--simulate", type=int, metavar="N", help="layouts that --search simulates (8)")
    add("--all-blocks", action="store_true", help="simulate every block of a deep model")
    add("--json", type=Path, metavar="FILE")
    add("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    try:
        cuda_device.load()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    check_options(options, "nodes", "gpus_per_node", "simulate", "json")
    if options.nodes * options.gpus_per_node > MOST_GPUS:
        asked = f"{options.nodes:,} x {options.gpus_per_node:,} GPUs"
        raise UserError(f"--nodes, --gpus-per-node: found {asked}, expected at most {MOST_GPUS:,} together")
    if not options.load >= 1:
        raise UserError(f"--load: found {options.load:g}, expected at least 1, the mean")
    if options.simulate and not options.search:
        raise UserError("--simulate: is for --search alone; add --search, or leave it out")
    # A notice for PyTorch's developers: its fake tensors have no data, whose pointers attention compares.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    from megamoe.apps.plan.assumptions import read
    from megamoe.apps.plan.hardware import gpu_of

    gpu = gpu_of(options.gpu)
    measured = read(options.assumptions) if options.assumptions else ()
    from megamoe.apps.plan.layout_search import SIMULATED, search, search_record, table
    from megamoe.apps.plan.plan import Cluster, make_plan
    from megamoe.apps.plan.plan_page import page, record
    from megamoe.config import load_config

    config = load_config(options.config, options.overrides)
    cluster = Cluster(options.nodes, options.gpus_per_node, gpu, measured)
    if options.search:
        found = search(config, cluster, options.load, options.simulate or SIMULATED, options.all_blocks)
        plan, shown = found.plans[0][1], search_record(found)
        print(f"{table(found)}\n\nthe first of them:\n")
    else:
        plan = make_plan(config, cluster, options.load, options.all_blocks)
        shown = record(plan)
    print(page(plan))
    if options.json:
        write_text("--json", options.json, json.dumps(shown, indent=1) + "\n")
