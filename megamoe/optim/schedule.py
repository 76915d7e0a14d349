"""Learning rate and global batch size as functions of the step, and the length of a run in steps."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megamoe.config.schema import OptimizerConfig, RunConfig, TrainConfig
from megamoe.errors import UserError


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of optimiser step `step`, counted from 1.

    A linear warm-up reaches `lr` at its last step (`warmup_steps`, or `warmup_share` of all). Then the
    schedule falls to `min_lr` until `decay_steps` and stays there: cosine (half a period), linear,
    inverse_sqrt (lr * sqrt(warmup / step), at least min_lr), wsd (constant, then linear, or a cosine with
    `wsd_decay`, over the last `wsd_decay_steps`; Hu et al. 2024), or constant.
    """
    warmup, peak, floor = warmup_steps(config, total_steps), config.lr, config.min_lr
    if step <= warmup:
        return peak * step / warmup
    end = config.decay_steps or total_steps
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return max(floor, peak * math.sqrt(max(warmup, 1) / step))
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, end - (config.wsd_decay_steps or max(1, end // 10)))
    if step >= end:
        return floor
    progress = max(0.0, (step - start) / (end - start))
    if (config.wsd_decay if config.schedule == "wsd" else config.schedule) == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return peak + (floor - peak) * progress


def warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the steps of the warm-up; a share is rounded up, like Hugging Face's warmup_ratio."""
    if config.warmup_share is None:
        return config.warmup_steps
    # Rounded first: 0.1 * 30 is a little more than 3 in binary.
    return math.ceil(round(config.warmup_share * total_steps, 6))


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size by the number of samples seen: constant, or growing (Megatron's ramp-up).

    unit: samples of one micro batch on every rank; every global batch is a multiple of it.
    """

    final: int
    unit: int
    start: int
    increment: int
    ramp_samples: int

    @classmethod
    def from_config(cls, train: TrainConfig, data_parallel: int) -> "BatchSchedule":
        """Return the schedule of a checked configuration."""
        unit = train.micro_batch_size * data_parallel
        final = train.global_batch_size or unit
        ramp = train.batch_rampup
        if ramp is None:
            return cls(final, unit, final, 1, 0)
        return cls(final, unit, ramp.start, ramp.increment, ramp.samples)

    def size_at(self, consumed_samples: int) -> int:
        """Return the global batch size of the step that starts after `consumed_samples`."""
        if consumed_samples >= self.ramp_samples or self.start >= self.final:
            return self.final
        increments = (self.final - self.start) // self.increment
        done = consumed_samples * increments // self.ramp_samples
        return min(self.final, self.start + done * self.increment)

    def sizes(self) -> range:
        """Return every global batch size that a step may have, in ascending order."""
        if self.ramp_samples == 0 or self.start >= self.final:
            return range(self.final, self.final + 1)
        return range(self.start, self.final + 1, self.increment)

    def accumulation_at(self, consumed_samples: int) -> int:
        """Return the micro batches per rank of that step."""
        return self.size_at(consumed_samples) // self.unit

    def total_samples(self, steps: int, consumed: int = 0) -> int:
        """Return `consumed` and the samples of the `steps` steps after them."""
        return consumed + sum(size * count for size, count in self.spans(steps, consumed))

    def spans(self, steps: int, consumed: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the batch sizes of the `steps` steps after `consumed` samples, and the steps of each."""
        while steps > 0:
            size = self.size_at(consumed)
            count = min(steps, self._steps_of_this_size(consumed, size) or steps)
            yield size, count
            consumed += count * size
            steps -= count

    def whole_steps(self, samples: int, consumed: int = 0) -> int:
        """Return the number of steps after `consumed` samples whose batches fit into that many in all."""
        steps = 0
        while consumed < self.ramp_samples:
            size = self.size_at(consumed)
            if consumed + size > samples:
                return steps
            steps, consumed = steps + 1, consumed + size
        return steps + max(0, samples - consumed) // self.final

    def _steps_of_this_size(self, consumed: int, size: int) -> int | None:
        """Return how many steps after `consumed` samples have this size; None: all later steps."""
        if consumed >= self.ramp_samples or self.start >= self.final:
            return None
        increments = (self.final - self.start) // self.increment
        done = consumed * increments // self.ramp_samples
        changes_at = -(-(done + 1) * self.ramp_samples // increments)
        return -(-(changes_at - consumed) // size)


def run_steps(
    config: RunConfig,
    schedule: BatchSchedule,
    samples_per_epoch: Callable[[], int],
    *,
    step: int = 0,
    consumed: int = 0,
) -> int:
    """Return `train.steps`, or the number of whole batches in `train.tokens` or `train.epochs`.

    All epochs form one stream, so less than one batch is left out at the end. An epoch of a blend has as many
    samples as all its sources together; the weights decide how often each source occurs in it.

    samples_per_epoch: called if the length is given in epochs; the data must already be checked.
    step, consumed: the steps that are done and the samples of their batches, which may have had another size.

    Raises:
        UserError: if there are fewer samples than one batch.
    """
    if config.train.steps is not None:
        return config.train.steps
    if config.train.tokens is not None:
        key, unit = "tokens", f"{config.train.tokens:,} / data.sequence_length {config.data.sequence_length}"
        samples = config.train.tokens // config.data.sequence_length
    else:
        assert config.train.epochs is not None
        epochs, per_epoch = config.train.epochs, samples_per_epoch()
        key, unit = "epochs", f"{epochs:g} of {per_epoch} training samples"
        samples = math.floor(round(epochs * per_epoch, 6))  # rounded first: 0.29 * 100 is under 29 in binary
    steps = step + schedule.whole_steps(samples, consumed)
    if steps == 0:
        raise UserError(
            f"train.{key}: {unit} are {samples}, fewer than the first batch of {schedule.size_at(0)} "
            f"(train.global_batch_size); raise train.{key}, or lower the batch size"
        )
    return steps
