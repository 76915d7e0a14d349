"""A simulated clock of a pipeline: when each pass ends, if passes and sends take given times."""

from collections.abc import Callable
from dataclasses import dataclass

from megamoe.parallel.pipeline.schedule import Pass, training_order

Seconds = Callable[[int, Pass], float]  # of a stage's pass


@dataclass(frozen=True)
class Timeline:
    """The passes of all stages on a clock, in seconds.

    end: of each pass by (stage, pass). busy: of each stage, the sum of its passes. total: of the whole.
    """

    end: dict[tuple[int, Pass], float]
    busy: list[float]
    total: float

    @property
    def idle(self) -> float:
        """The share of the stages' time in which they wait; the bubble."""
        return 1 - sum(self.busy) / (len(self.busy) * self.total)


def simulate(stages: int, chunks: int, micro_batches: int, seconds: Seconds, send: float = 0) -> Timeline:
    """Run all stages in their training order; each pass begins when what it needs has come.

    seconds: of each pass. send: seconds between the end of a pass and the arrival of its result at another
    stage; sends take no time of the stages.
    """
    orders = [training_order(stage, stages, chunks, micro_batches) for stage in range(stages)]
    places = [0] * stages
    free: list[float] = [0] * stages  # whole numbers: times may be fractions
    busy: list[float] = [0] * stages
    end: dict[tuple[int, Pass], float] = {}
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                each = order[places[stage]]
                needed = _needs(stage, each, stages, chunks)
                if needed is not None and needed not in end:
                    break
                arrival = 0 if needed is None else end[needed] + (send if needed[0] != stage else 0)
                took = seconds(stage, each)
                free[stage] = end[stage, each] = max(free[stage], arrival) + took
                busy[stage] += took
                places[stage] += 1
                moved = True
        assert moved, "the stages wait for each other"
    return Timeline(end, busy, max(free))


def _needs(stage: int, each: Pass, stages: int, chunks: int) -> tuple[int, Pass] | None:
    """Return (stage, pass) whose result a pass needs; None: it needs data only."""
    part = each.chunk * stages + stage
    if each.forward and part == 0:
        return None
    if not each.forward and part == stages * chunks - 1:
        return stage, Pass(True, each.micro_batch, each.chunk)
    chunk, of_stage = divmod(part - 1 if each.forward else part + 1, stages)
    return of_stage, Pass(each.forward, each.micro_batch, chunk)
