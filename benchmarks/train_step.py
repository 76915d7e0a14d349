"""Time of one training step of an MoE model against the dense one of equal active FLOPs.

    python benchmarks/train_step.py [--config examples/demo.yaml] [--rounds 15] [section.key=value ...]

Both models are trained in one process on mock data, a step of each in turn, so that a machine whose speed
drifts slows both. The dense model's FFN is as large as the experts that one token meets. Printed: the
median time of a step, tokens/s, and the median of the rounds' ratios with its 90 % interval.
"""

import statistics
import tempfile
from functools import partial

from megamoe.vendors import settle_vendors

settle_vendors()

from common.command import mistakes_told, parser_of_a_run  # noqa: E402
from common.machine import settle_process  # noqa: E402
from common.rounds import Ratio, in_turn  # noqa: E402
from megamoe.config import RunConfig, load_config  # noqa: E402
from megamoe.model.size import expert_ffn_size, mean_choices  # noqa: E402
from megamoe.train.trainer import Trainer  # noqa: E402

WARM_UP_ROUNDS = 2


def main() -> int:
    """Measure and print; 2 for a mistake of the user's."""
    parser = parser_of_a_run(__doc__, rounds=15)
    arguments = parser.parse_intermixed_args()
    settle_process()
    with mistakes_told(parser), tempfile.TemporaryDirectory() as output:
        common = ["data.mock=true", f"output={output}", "data.workers=0", "evaluation.batches=0"]
        common += ["optimizer.schedule=constant", *arguments.overrides]
        common += [f"train.steps={arguments.rounds + WARM_UP_ROUNDS}"]
        moe = load_config(arguments.config, common)
        width = active_ffn_size(moe)
        dense = load_config(arguments.config, [*common, "moe.layers=none", f"model.ffn_hidden_size={width}"])
        report(moe, dense, arguments.rounds)
    return 0


def active_ffn_size(config: RunConfig) -> int:
    """FFN size of the dense model: the chosen and the shared experts' together."""
    routed = mean_choices(config) * config.moe.expert_sublayers
    return round((routed + config.moe.num_shared_experts) * expert_ffn_size(config))


def report(moe: RunConfig, dense: RunConfig, rounds: int) -> None:
    """Train both in turn and print the table."""
    trainers = {"moe": Trainer(moe), "dense": Trainer(dense)}
    runs = {name: partial(_seconds, trainer) for name, trainer in trainers.items()}
    seconds = in_turn(runs, rounds, WARM_UP_ROUNDS)
    trainers["moe"].close()
    tokens = trainers["moe"].schedule.final * moe.data.sequence_length
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:6} {1000 * median:8.1f} ms a step {tokens / median:10,.0f} tokens/s")
    ratio = Ratio.of(seconds["moe"], seconds["dense"])
    interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
    print(f"ratio moe / dense: {ratio.median:.3f} (90 % interval of the median {interval})")


def _seconds(trainer: Trainer, _: int) -> float:
    _, metrics = trainer.step()
    return metrics["perf/step_s"]


if __name__ == "__main__":
    raise SystemExit(main())
