"""The speed of a step: tokens and model FLOPs a second, and model FLOP utilisation."""

from dataclasses import dataclass

import torch

from megamoe.config.schema import RunConfig
from megamoe.costs.gpus import peak_of_device
from megamoe.model.flops import ModelFlops, model_flops
from megamoe.moe.timers import StageTimers
from megamoe.parallel.launch import World
from megamoe.train.objective import token_shares
from megamoe.train.resolved import ResolvedRun
from megamoe.train.step_record import StepRecord


@dataclass(frozen=True)
class Speed:
    """What the speed is measured by.

    peak: FLOP/s of one rank's device, None if it is not known. length: the tokens of a sample that `flops`
    counts. counted: those that the metrics count.
    """

    flops: ModelFlops
    ranks: int
    peak: float | None
    length: int
    counted: int

    @classmethod
    def of(cls, config: RunConfig, run: ResolvedRun, world: World) -> "Speed":
        """Return it for a run; the peak is `log.peak_tflops` or that of a known GPU."""
        peak = None
        if config.log.peak_tflops is not None:
            peak = config.log.peak_tflops * 1e12
        elif world.device.type == "cuda":
            peak = peak_of_device(torch.cuda.get_device_name(world.device), run.plan.precision)
        flops = model_flops(config, run.vocabulary.size, token_shares(config))
        return cls(flops, world.size, peak, config.data.sequence_length, run.sample_tokens)

    def metrics(self, record: StepRecord, samples: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a step over so many samples of the global batch."""
        pairs = sum(int(layer.load_E.sum()) for layer in record.layers.values())
        rate = self.flops.of_step(samples * self.length, pairs) / seconds / self.ranks
        metrics = {
            "perf/tokens_per_s": samples * self.counted / seconds,
            "perf/step_s": seconds,
            "perf/tflops_per_rank": rate / 1e12,
        }
        return metrics if self.peak is None else {**metrics, "perf/mfu": rate / self.peak}


def stage_metrics(timers: StageTimers | None) -> dict[str, float]:
    """Return the seconds of the MoE layers' stages in this step, on this rank, if they are measured."""
    return {} if timers is None else {f"perf/{name}_s": s for name, s in timers.seconds().items()}
