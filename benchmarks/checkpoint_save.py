"""What a save costs training: in the background, and where training waits for it.

    python benchmarks/checkpoint_save.py [--config examples/demo.yaml] [--rounds 15] [section.key=value ...]

Each round times steps one by one, on mock data: some without a save, then one that begins a save and those
beside which it is written, then a save that is waited for. Printed, as the median of the rounds with its 90 %
interval and in units of the round's median plain step: what the step that begins a save takes longer, what
each of the steps beside the writing does, all of them together, and the save that is waited for.
"""

import statistics
import sys
import tempfile
import time

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common.command import parser_of_a_run, user_errors_exit_2  # noqa: E402
from common.machine import settle_process  # noqa: E402
from common.rounds import middle_range  # noqa: E402
from megamoe.config import RunConfig, load_config  # noqa: E402
from megamoe.train.trainer import Trainer  # noqa: E402

PLAIN_STEPS, MOST_STEPS = 6, 30  # of a round; those beside the writing at most
WARM_UP_ROUNDS = 2


def main() -> int:
    """Measure and print; 2 for a mistake of the user's."""
    parser = parser_of_a_run(__doc__, rounds=15)
    arguments = parser.parse_intermixed_args()
    settle_process()
    with user_errors_exit_2(parser), tempfile.TemporaryDirectory(dir=".") as output:
        common = ["data.mock=true", f"output={output}", "data.workers=0", "evaluation.batches=0"]
        common += ["optimizer.schedule=constant", "checkpoint.keep=1", "train.steps=1000000"]
        report(load_config(arguments.config, [*common, *arguments.overrides]), arguments.rounds)
    return 0


def report(config: RunConfig, rounds: int) -> None:
    """Train, save and print."""
    trainer = Trainer(config)
    found: dict[str, list[float]] = {}
    for number in range(WARM_UP_ROUNDS + rounds):
        measured = _round(trainer)
        for name, value in measured.items() if number >= WARM_UP_ROUNDS else ():
            found.setdefault(name, []).append(value)
    path = trainer.checkpoints.latest()
    assert path is not None
    written = sum(file.stat().st_size for file in path.iterdir())
    state = 12 * sum(parameter.numel() for parameter in trainer.engine.model.parameters())
    trainer.close()
    print(f"a plain step: {statistics.median(found.pop('plain')):.3f} s")
    print(f"a checkpoint: {written / 1e6:.1f} MB, {written / state:.4f} of fp32 weights and moments")
    for name, values in found.items():
        ordered = sorted(values)
        low, high = middle_range(ordered)
        print(f"{name}: {statistics.median(ordered):.3f} ({low:.3f} to {high:.3f})")


def _round(trainer: Trainer) -> dict[str, float]:
    checkpoints = trainer.checkpoints
    plain = [_seconds(trainer.step) for _ in range(PLAIN_STEPS)]
    begins = _seconds(trainer.begin_save) + _seconds(trainer.step)
    beside: list[float] = []
    while not checkpoints.is_written and len(beside) < MOST_STEPS:
        beside.append(_seconds(trainer.step))
    publishes = _seconds(checkpoints.finish)
    checkpoints.close()
    plain += [_seconds(trainer.step) for _ in range(PLAIN_STEPS)]
    waited = _seconds(trainer.save)
    checkpoints.close()
    step = statistics.median(plain)
    return {
        "plain": step,
        "longer, the step that begins a save": begins / step - 1,
        "longer, each step beside the writing": statistics.mean(beside or [step]) / step - 1,
        "longer, all of them and publishing": (begins + sum(beside) + publishes) / step - 1 - len(beside),
        "steps beside the writing": float(len(beside)),
        "a save that is waited for": waited / step,
    }


def _seconds(action) -> float:  # type: ignore[no-untyped-def]
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
