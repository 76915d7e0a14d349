"""Checks of two micro batches in flight against the layout, the DeepSpeed file, the model and the batches."""

from collections.abc import Iterator

from megamoe.config.schema import RunConfig
from megamoe.errors import Problem
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.zero.deepspeed_config import ParallelPlan

KEY = "train.in_flight"


def in_flight_problems(
    config: RunConfig, plan: ParallelPlan, schedule: BatchSchedule | None
) -> Iterator[Problem]:
    """Yield why two micro batches cannot take turns.

    schedule: of the batch size; None: it is wrong itself.
    """
    if config.train.in_flight == 1:
        return
    where = config.parallel.deepspeed or "the DeepSpeed file"
    if config.parallel.pipeline > 1:
        yield Problem(
            KEY,
            f"2 is not possible with parallel.pipeline {config.parallel.pipeline}, whose stages order the "
            "passes of the micro batches; set one of the two to 1",
        )
    if plan.stage == 3:
        yield Problem(
            KEY,
            f"2 is not possible with zero_optimization.stage 3 ({where}), which gathers and frees the "
            "weights of one pass at a time; set it to 1, or take stage 0, 1 or 2",
        )
    if config.model.fp8 != "none":
        yield Problem(
            KEY,
            f"2 is not possible with model.fp8 {config.model.fp8}, whose scales are of one pass at a time; "
            "set it to 1, or model.fp8: none",
        )
    if schedule is not None and schedule.final < 2 * schedule.unit:
        yield Problem(
            KEY,
            f"2 needs at least two micro batches a step of each rank, but train.global_batch_size "
            f"{schedule.final} is one of each: set it to {2 * schedule.unit} or more, or "
            "train.in_flight to 1",
        )
