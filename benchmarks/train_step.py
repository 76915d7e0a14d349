"""Time of one training step of an MoE model against the dense one of equal active FLOPs.

    python benchmarks/train_step.py [--config examples/demo.yaml] [--rounds 15] [section.key=value ...]

Both models are trained in one process on mock data, a step of each in turn, so that a machine whose speed
drifts slows both. The dense model's FFN is as large as the experts that one token meets. Printed: the
median time of a step, tokens/s, and the median of the rounds' ratios with its 90 % interval.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from megamoe.vendors import settle_vendors

settle_vendors()

from megamoe.config import RunConfig, load_config  # noqa: E402
from megamoe.errors import UserError  # noqa: E402
from megamoe.model.size import expert_ffn_size, num_choices  # noqa: E402
from megamoe.train.trainer import Trainer  # noqa: E402

WARM_UP_ROUNDS = 2


def main() -> int:
    """Measure and print; 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(Path(__file__).parent.parent / "examples/demo.yaml"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    try:
        with tempfile.TemporaryDirectory() as output:
            common = ["data.mock=true", f"output={output}", "data.workers=0", "evaluation.batches=0"]
            common += ["optimizer.schedule=constant", *arguments.overrides]
            common += [f"train.steps={arguments.rounds + WARM_UP_ROUNDS}"]
            moe = load_config(arguments.config, common)
            width = active_ffn_size(moe)
            dense = load_config(
                arguments.config, [*common, "moe.layers=none", f"model.ffn_hidden_size={width}"]
            )
            report(moe, dense, arguments.rounds)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    return 0


def active_ffn_size(config: RunConfig) -> int:
    """FFN size of the dense model: the chosen and the shared experts' together."""
    routed = num_choices(config) * config.moe.expert_sublayers
    return (routed + config.moe.num_shared_experts) * expert_ffn_size(config)


def report(moe: RunConfig, dense: RunConfig, rounds: int) -> None:
    """Train both in turn and print the table."""
    trainers = {"moe": Trainer(moe), "dense": Trainer(dense)}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, trainer in trainers.items():
            _, metrics = trainer.step()
            seconds[name].append(metrics["perf/step_s"])
    trainers["moe"].close()
    tokens = trainers["moe"].schedule.final * moe.data.sequence_length
    for name, times in seconds.items():
        median = statistics.median(times[WARM_UP_ROUNDS:])
        print(f"{name:6} {1000 * median:8.1f} ms a step {tokens / median:10,.0f} tokens/s")
    pairs = zip(seconds["moe"], seconds["dense"], strict=True)
    ratios = sorted(moe / dense for moe, dense in list(pairs)[WARM_UP_ROUNDS:])
    low, high = median_interval(ratios)
    median = statistics.median(ratios)
    print(f"ratio moe / dense: {median:.3f} (90 % interval of the median {low:.3f} to {high:.3f})")


def median_interval(ordered: list[float]) -> tuple[float, float]:
    """The 90 % confidence interval of the median by order statistics (normal approximation)."""
    count = len(ordered)
    reach = 1.645 * count**0.5 / 2
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return ordered[max(0, low)], ordered[min(count - 1, high)]


if __name__ == "__main__":
    raise SystemExit(main())
