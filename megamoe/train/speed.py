"""The speed of a step (tokens, model FLOPs, utilisation), and a window of steps recorded by
torch.profiler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.config.schema import ProfilerConfig, RunConfig
from megamoe.errors import UserError
from megamoe.metrics import names
from megamoe.metrics.gpus import peak_of_device
from megamoe.model.size import ModelFlops, model_flops
from megamoe.moe.timers import StageTimers
from megamoe.parallel.launch import World
from megamoe.train.callbacks import Callback, TrainingRun
from megamoe.train.objective import token_shares
from megamoe.train.resolved import ResolvedRun
from megamoe.train.step_record import StepRecord


@dataclass(frozen=True)
class Speed:
    """What the speed is measured by.

    peak: FLOP/s of one rank's device, None if it is not known. length: the tokens of a sample that `flops`
    counts. counted: those that the metrics count. rollouts: how many times each sample is computed.
    """

    flops: ModelFlops
    ranks: int
    peak: float | None
    length: int
    counted: int
    rollouts: int = 1

    @classmethod
    def of(cls, config: RunConfig, run: ResolvedRun, world: World, rollouts: int) -> "Speed":
        """Return it for a run; the peak is `log.peak_tflops` or that of a known GPU."""
        peak = None
        if config.log.peak_tflops is not None:
            peak = config.log.peak_tflops * 1e12
        elif world.device.type == "cuda":
            peak = peak_of_device(torch.cuda.get_device_name(world.device), run.plan.precision)
        flops = model_flops(config, run.vocabulary.size, token_shares(config))
        return cls(flops, world.size, peak, config.data.sequence_length, run.sample_tokens, rollouts)

    def metrics(self, record: StepRecord, samples: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a step over so many samples of the global batch."""
        pairs = {number: int(layer.load_E.sum()) for number, layer in record.layers.items()}
        flops = self.flops.of_step(self.rollouts * samples * self.length, pairs)
        rate = flops / seconds / self.ranks
        metrics = {
            names.TOKENS_PER_S: samples * self.counted / seconds,
            names.STEP_S: seconds,
            names.TFLOPS_PER_RANK: rate / 1e12,
            names.GFLOPS_PER_TOKEN: flops / (samples * self.counted) / 1e9,
        }
        return metrics if self.peak is None else {**metrics, names.MFU: rate / self.peak}


def stage_metrics(timers: StageTimers | None) -> dict[str, float]:
    """Return the seconds of the MoE layers' stages in this step, on this rank, if they are measured."""
    return {} if timers is None else {names.STAGES[name]: s for name, s in timers.seconds().items()}


class ProfilerWindow(Callback):
    """Records steps `start_step` to `start_step + num_steps - 1` of this rank as a Chrome trace."""

    config: ProfilerConfig
    _profiler: Any = None

    def on_step_begin(self, trainer: TrainingRun) -> None:
        """Start recording before the first step of the window."""
        if trainer.progress.step + 1 != self.config.start_step:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def on_step_end(self, trainer: TrainingRun, metrics: Mapping[str, Any]) -> None:
        """Write the trace after the last step of the window."""
        if trainer.progress.step >= (self.config.start_step or 0) + self.config.num_steps - 1:
            self.on_train_end(trainer)

    def on_train_end(self, trainer: TrainingRun) -> None:
        """Write the trace, if it is not written; the run may end inside the window."""
        if self._profiler is None:
            return
        self._profiler.stop()
        path = trainer.folder.path / "profile" / f"rank_{trainer.world.rank:05d}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
        except OSError as error:
            raise UserError(f"train.profiler: cannot write {path}: {error.strerror}") from None
        self._profiler = None
        trainer.world.say(f"profile: {path}")
