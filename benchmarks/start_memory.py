"""Memory that a start takes: the most that each rank's process holds beside what it holds when it is ready.

    python benchmarks/start_memory.py [--ranks 2] [--config FILE] [section.key=value ...]

Starts the run of so many ranks on this machine's CPU, without a step, and prints of each rank, in MB: the
weights of the whole model in fp32, by how much its resident memory grew at most from the beginning of the
start until the model was built, until the engine was, and by how much when the run was ready. On a CPU the
engine's tensors are in the same memory. Without --config: a model of 280 M parameters in 12 blocks.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common import resident  # noqa: E402
from common.command import parser_of, positive, user_errors_exit_2  # noqa: E402
from common.machine import settle_process  # noqa: E402
from megamoe.config import RunConfig, load_config  # noqa: E402
from megamoe.model.size import model_size  # noqa: E402
from megamoe.parallel.zero.engine import Engine  # noqa: E402
from megamoe.train import trainer as trainer_module  # noqa: E402

MODEL = [
    *("model.num_layers=12", "model.hidden_size=768", "model.num_attention_heads=12"),
    *("model.vocab_size=32768", "model.ffn_hidden_size=2048"),
    *("moe.layers.every=1", "moe.num_experts=8", "moe.expert_ffn_hidden_size=1024"),
]
OF_A_START = ["data.mock=true", "data.workers=0", "data.sequence_length=128", "log.report=false"]


def main() -> int:
    """Measure and print; 2 for a mistake of the user's."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--config", help="a run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    own = MODEL if arguments.config is None else []
    with user_errors_exit_2(parser):
        config = load_config(arguments.config, [*own, *OF_A_START, *arguments.overrides])
        if "RANK" in os.environ:
            print(json.dumps(measure(config)))
            return 0
    with tempfile.TemporaryDirectory() as output:
        return report(arguments.ranks, output)


def report(ranks: int, output: str) -> int:
    """Start the ranks and print what they measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, f"output={output}"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return max(process.returncode for process in processes)
    for rank, text in enumerate(said):
        found = json.loads(text.splitlines()[-1])
        print(f"rank {rank}: " + ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in found.items()))
    return 0


def measure(config: RunConfig) -> dict[str, int]:
    """Measure the bytes of the whole model in fp32, and those by which this process grew."""
    settle_process()
    resident.forget_peak()
    before = resident.now()
    most: dict[str, int] = {}

    def engine(*arguments: Any) -> Engine:
        most["model built"] = resident.peak() - before
        return Engine(*arguments)

    trainer_module.Engine = engine  # type: ignore[misc, assignment]
    trainer = trainer_module.Trainer(config)
    most["engine built"] = resident.peak() - before
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not held
    ready = resident.now() - before
    size = 4 * model_size(config, trainer.run.vocabulary.size).total
    trainer.close()
    return {"whole model": size, **most, "ready": ready}


if __name__ == "__main__":
    sys.exit(main())
