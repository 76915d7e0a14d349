"""What reading data from object storage costs, once its blocks are on the local disk.

    python benchmarks/remote_data.py [--config examples/demo.yaml] [--rounds 7] [--tokens 16000000]
        [--steps 5] [section.key=value ...]

Writes random tokens into a folder, which stands for a bucket (file://), and fetches all blocks. Then, in each
round and in turn, from the disk and from the blocks: samples alone, for both orders, and training steps that
read their samples themselves (data.workers=0). Printed are medians, and the ratio of the rounds; the CPU time
too, which other processes of the machine disturb less. A process compares a block with its checksum when it
first reads it; what that takes is printed first.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common.command import parser_of_a_run, positive, user_errors_exit_2  # noqa: E402
from common.machine import settle_process  # noqa: E402
from common.rounds import Ratio, in_turn  # noqa: E402
from megamoe.config import load_config  # noqa: E402
from megamoe.config.schema import DataConfig, SourceConfig  # noqa: E402
from megamoe.data.blocks import BLOCK_BYTES  # noqa: E402
from megamoe.data.byte_files import open_bytes  # noqa: E402
from megamoe.data.card import DataFiles  # noqa: E402
from megamoe.data.datasets import build_datasets, resolve_vocabulary  # noqa: E402
from megamoe.data.stored import localized  # noqa: E402
from megamoe.data.tokenizers import load_tokenizer  # noqa: E402
from megamoe.data.write import TextCounts, write_card, write_tokens  # noqa: E402
from megamoe.train.trainer import Trainer  # noqa: E402

DOCUMENT = 500  # tokens
SAMPLES = 2000  # of a round
WARM_UP_ROUNDS = 1
Times = tuple[float, float]  # s, and s of the CPU


def main() -> int:
    """Measure and print; 2 for a mistake of the user's."""
    parser = parser_of_a_run(__doc__, rounds=7)
    parser.add_argument("--tokens", type=positive, default=16_000_000)
    parser.add_argument("--steps", type=positive, default=5, help="of a round")
    arguments = parser.parse_intermixed_args()
    settle_process()
    with user_errors_exit_2(parser), tempfile.TemporaryDirectory(dir=".") as folder:
        prefix, cache = Path(folder).resolve() / "corpus", Path(folder).resolve() / "blocks"
        write(prefix, arguments.tokens)
        places = {"disk": str(prefix), "blocks": f"file://{prefix}"}
        report_blocks(places["blocks"], cache, arguments.rounds)
        for order in ("documents", "samples"):
            runs = {name: reading(place, cache, order) for name, place in places.items()}
            report(f"a sample, order {order}", runs, arguments.rounds, 1e6 / SAMPLES, "us")
        own = ["data.mock=false", "data.workers=0", "data.tokenizer=null", "model.vocab_size=null"]
        own += ["evaluation.batches=0", "train.steps=1000000", "optimizer.schedule=constant"]
        own += [f"output={folder}", f"data.remote_cache={cache}", "data.validation={}"]
        steps: dict[str, Callable[[int], Times]] = {}
        for name, place in places.items():
            source = [f"name=run_{name}", f"data.sources=['{place}']"]
            trainer = Trainer(load_config(arguments.config, [*own, *source, *arguments.overrides]))
            steps[name] = lambda number, step=trainer.step: seconds(step, arguments.steps)  # type: ignore[misc]
        report("a training step", steps, arguments.rounds, 1e3 / arguments.steps, "ms")
    return 0


def write(prefix: Path, tokens: int) -> None:
    """Write a dataset of random bytes as tokens."""
    tokenizer, files, draws = load_tokenizer("bytes"), DataFiles(prefix), np.random.default_rng(1)

    def batches() -> Iterator[list[np.ndarray]]:
        for _ in range(0, tokens, 1000 * DOCUMENT):
            yield list(draws.integers(0, 256, (1000, DOCUMENT - 1)))

    counts_V = write_tokens(batches(), tokenizer, files)
    write_card(TextCounts(documents=int(counts_V[tokenizer.eod])), tokenizer, "bytes", files, counts_V)


def config_of(place: str, cache: Path) -> DataConfig:
    """Return the configuration of the data at a place."""
    sources, split = [SourceConfig(place)], [1.0, 0.0, 0.0]
    return DataConfig(sources=sources, split=split, sequence_length=2048, remote_cache=str(cache))


def report_blocks(url: str, cache: Path, rounds: int) -> None:
    """Fetch all blocks; then print what two reads of a byte of each take a new reader."""
    path = DataFiles(Path(localized(config_of(url, cache)).sources[0].path)).bin
    first: list[float] = []
    second: list[float] = []
    for number in range(rounds + 1):
        tokens = open_bytes(path)
        for times in (first, second):
            for at in range(0, tokens.size, BLOCK_BYTES):
                begin = time.perf_counter()
                tokens.read(at, 1)
                if number:  # before, they are fetched
                    times.append(time.perf_counter() - begin)
    first_s, second_s = statistics.median(first), statistics.median(second)
    print(
        f"a block of {BLOCK_BYTES:,} bytes: first read {first_s * 1e3:.2f} ms, second {second_s * 1e6:.1f} us"
    )


def reading(place: str, cache: Path, order: str) -> Callable[[int], Times]:
    """Return what reads the next samples and returns the seconds; all blocks are fetched before."""
    data = localized(config_of(place, cache))
    data.order = order  # type: ignore[assignment]
    vocabulary = resolve_vocabulary(data, None)
    dataset = build_datasets(data, vocabulary, seed=1, train_samples=10 * SAMPLES, validation_samples=0).train
    return lambda number: seconds(lambda: [dataset[number * 7 + each] for each in range(SAMPLES)], 1)


def seconds(action: Callable[[], object], times: int) -> Times:
    """Return how long so many calls take, and the CPU time of this process."""
    started, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        action()
    return time.perf_counter() - started, time.process_time() - used


def report(what: str, runs: dict[str, Callable[[int], Times]], rounds: int, scale: float, unit: str) -> None:
    """Measure in turn, and print a line for each clock."""
    found = in_turn(runs, rounds, WARM_UP_ROUNDS)
    for place, clock in enumerate(("time", "CPU time")):
        times = {name: [scale * each[place] for each in found[name]] for name in runs}
        ratio = Ratio.of(times["blocks"], times["disk"])
        disk, blocks = (statistics.median(times[name]) for name in ("disk", "blocks"))
        print(
            f"{what}, {clock}: disk {disk:.1f} {unit}, blocks {blocks:.1f} {unit}, "
            f"ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
