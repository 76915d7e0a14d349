"""What the routing metrics cost: a whole training step with them against one without, in paired rounds.

    python benchmarks/metrics_cost.py [--config examples/demo.yaml] [--rounds 40] [section.key=value ...]

One trainer takes steps on mock data, in turn with the metrics as they are, and with only the load and the
losses, as the step needs them: without gate entropy, experts per token, numbers of the parts, and without
the metrics' names and formulas on the host. The training is the same. Printed are medians, and the median of
the rounds' ratios with its 90 % interval.

Bar: at most 1.02; it holds where the interval reaches it. Ends with 1 if it does not, with 2 for a mistake.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megamoe.compat.startup import configure_libraries

configure_libraries()

from torch import Tensor  # noqa: E402

from common.command import parser_of_a_run, user_errors_exit_2  # noqa: E402
from common.machine import settle_process  # noqa: E402
from common.rounds import Ratio, in_turn  # noqa: E402
from megamoe.kernels.choice import Kernels  # noqa: E402
from megamoe.moe import layer  # noqa: E402
from megamoe.moe.observation import Observation  # noqa: E402
from megamoe.moe.routing import Routing  # noqa: E402
from megamoe.parallel import launch  # noqa: E402
from megamoe.train import step, trainer  # noqa: E402
from megamoe.train.trainer import Trainer  # noqa: E402
from steps.configs import Asked  # noqa: E402

ROUNDS, WARM_UP_ROUNDS, BAR = 40, 3, 1.02


def bare(routing: Routing, losses: dict[str, Tensor], kernels: Kernels) -> Observation:
    """Observe what a step needs: the load, for the routers' updates, and the losses."""
    load_E, wanted_E = routing.counts_E(), routing.wanted_counts_E()
    zero = routing.scores_TE.new_zeros(())
    return Observation(load_E, wanted_E, losses, load_E.new_zeros(len(load_E) + 1), zero, zero)


@contextmanager
def without_metrics() -> Iterator[None]:
    """Leave out what is measured here."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (layer, "observe", bare),
        (step, "measured_parameters", lambda model: []),
        (step, "part_metrics", lambda model: {}),
        (trainer, "routing_metrics", lambda *arguments: {}),
    ]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, before, strict=True):
            setattr(module, name, function)


def seconds_of_a_step(run: Trainer) -> float:
    """Take one step of a run on one rank."""
    started = time.perf_counter()
    run.step()
    return time.perf_counter() - started


def measure(run: Trainer, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round's step with the metrics and without."""

    def bare_step(number: int) -> float:
        with without_metrics():
            return seconds_of_a_step(run)

    return in_turn(
        {"with": lambda number: seconds_of_a_step(run), "without": bare_step}, rounds, WARM_UP_ROUNDS
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of_a_run(__doc__, rounds=ROUNDS)
    arguments = parser.parse_intermixed_args(argv)
    with user_errors_exit_2(parser), tempfile.TemporaryDirectory() as output:
        asked = Asked(arguments.config, arguments.overrides)
        config = asked.moe_and_dense(2 * (arguments.rounds + WARM_UP_ROUNDS), output)["moe"]
        settle_process()
        run = Trainer(config)
        found = measure(run, arguments.rounds)
        run.close()
        launch.stop()
    ratio = Ratio.of(found["with"], found["without"])
    for name, seconds in found.items():
        print(f"{name:8}{statistics.median(seconds) * 1000:10.2f} ms")
    print(f"ratio   {ratio.median:10.4f}  ({ratio.low:.4f} to {ratio.high:.4f}), bar {BAR}")
    return int(ratio.low > BAR)


if __name__ == "__main__":
    sys.exit(main())
