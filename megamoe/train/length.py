"""The run's length in optimiser steps, as configured or computed from epochs and the data."""

import math
from collections.abc import Callable

from megamoe.config import RunConfig
from megamoe.errors import UserError
from megamoe.train.schedule import BatchSchedule, warmup_steps


def run_steps(config: RunConfig, schedule: BatchSchedule, samples_per_epoch: Callable[[], int]) -> int:
    """Return `train.steps`, or the number of whole batches in `train.epochs` of the training data.

    All epochs form one stream, so less than one batch is left out at the end. An epoch of a blend has as many
    samples as all its sources together; the weights decide how often each source occurs in it.

    samples_per_epoch: called if the length is given in epochs; the data must already be checked.

    Raises:
        UserError: if there are fewer samples than one batch, or if the warm-up is longer than the schedule.
    """
    steps = config.train.steps
    if config.train.epochs is not None:
        steps = _steps_of_epochs(config.train.epochs, samples_per_epoch(), schedule)
    assert steps is not None
    check_warmup(config, steps)
    return steps


def _steps_of_epochs(epochs: float, per_epoch: int, schedule: BatchSchedule) -> int:
    samples = math.floor(round(epochs * per_epoch, 6))  # rounded first: 0.29 * 100 is under 29 in binary
    steps = schedule.whole_steps(samples)
    if steps == 0:
        raise UserError(
            f"train.epochs: {epochs:g} of {per_epoch} training samples are {samples}, fewer than the first "
            f"batch of {schedule.size_at(0)} (train.global_batch_size); raise train.epochs, or lower the "
            "batch size"
        )
    return steps


def check_warmup(config: RunConfig, steps: int) -> None:
    """Raise UserError if the warm-up, or the decay of `wsd`, does not fit into the schedule."""
    optimizer = config.optimizer
    end, warmup = optimizer.decay_steps or steps, warmup_steps(optimizer, steps)
    if optimizer.schedule == "constant":
        return
    decay = optimizer.wsd_decay_steps
    if optimizer.schedule == "wsd" and decay is not None and warmup <= end < warmup + decay:
        after = f" after a warm-up of {warmup}" if warmup else ""
        raise UserError(
            f"optimizer.wsd_decay_steps: {decay}{after} is more than the {end} steps of the schedule "
            "(optimizer.decay_steps, by default the run's); lower optimizer.wsd_decay_steps or the warm-up"
        )
    if warmup <= end:
        return
    if optimizer.warmup_share is None:
        found = f"optimizer.warmup_steps: {warmup} is"
        way_out = f"set optimizer.warmup_steps={end} or less"
    else:
        found = f"optimizer.warmup_share: {optimizer.warmup_share:g} of {steps} steps, {warmup}, is"
        way_out = "set a smaller optimizer.warmup_share"
    raise UserError(
        f"{found} more than the {end} steps of the schedule (optimizer.decay_steps, by default the run's); "
        f"{way_out}"
    )
