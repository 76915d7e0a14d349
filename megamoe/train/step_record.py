"""What one optimiser step showed: the sums of `step_sums`, as the metrics and the trainer read them."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megamoe.metrics.names import AUXILIARY_LOSS, GRAD_NORM, LM_LOSS, LOSS, MTP_LOSS, WEIGHTED_LOSS, fill
from megamoe.resilience.skipped_steps import Problem


@dataclass
class LayerRecord:
    """What one MoE layer saw in a step, over all ranks and micro batches.

    load_E, wanted_E: int64, pairs computed and wanted, of the experts that compute. width_D: int64, tokens by
    their number of computed experts. entropy, top_1: sums over tokens, see `Observation`. losses: sums over
    micro batches, unweighted; loss_weights: their weights. part_metrics: of the parts, by
    `<part>/<name>`.
    """

    load_E: Tensor
    wanted_E: Tensor
    width_D: Tensor
    entropy: float = 0.0
    top_1: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    loss_weights: dict[str, float] = field(default_factory=dict)
    part_metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class StepRecord:
    """The sums of a step over the global batch.

    losses: each auxiliary loss, unweighted, summed over layers and micro batches. problem: why the step was
    not applied. not_finite: of this rank's micro batches, by their places, the samples whose lm loss is not
    finite. message: printed by the loop. wanted_on_device: `wanted_E` of every layer, on the device. mtp: the
    mean cross entropy of each depth of multi-token prediction; mtp_weight: of each of them in the loss.
    compute_seconds_R: of each rank, its own time in the step before (`LocalComputeTimer`); 0: not measured.
    gradient_squares: the sum of `Engine.gradient_squares` over the ranks, if there are any.
    """

    lm_sum: float = 0.0
    tokens: float = 0.0
    micro_batches: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    wanted_on_device: dict[int, Tensor] = field(default_factory=dict)
    mtp: list[float] = field(default_factory=list)
    mtp_weight: float = 0.0
    grad_norm: float = float("nan")
    problem: Problem | None = None
    not_finite: dict[int, list[int]] = field(default_factory=dict)
    message: str = ""
    compute_seconds_R: list[float] = field(default_factory=list)
    gradient_squares: float | None = None

    @property
    def lm_loss(self) -> float:
        """Mean cross entropy of the unmasked tokens, nats."""
        return self.lm_sum / max(self.tokens, 1.0)

    @property
    def loss(self) -> float:
        """The lm loss plus the weighted losses of multi-token prediction and of the layers."""
        weighted = sum(self.weighted_sum(name) for name in self.losses)
        loss = self.lm_loss + weighted / max(self.micro_batches, 1)
        return loss + self.mtp_weight * sum(self.mtp)

    def weighted_sum(self, name: str) -> float:
        """Return weight * loss of an auxiliary loss, summed over layers and micro batches."""
        weights = {layer.loss_weights[name] for layer in self.layers.values() if name in layer.loss_weights}
        if len(weights) == 1:
            return weights.pop() * self.losses[name]
        return sum(
            layer.loss_weights[name] * layer.losses[name]
            for layer in self.layers.values()
            if name in layer.loss_weights
        )

    def metrics(self) -> dict[str, Any]:
        """Return the losses and the gradient norm under metrics.jsonl's names."""
        values: dict[str, Any] = {LM_LOSS: self.lm_loss, LOSS: self.loss}
        for depth, mtp in enumerate(self.mtp, 1):
            values[fill(MTP_LOSS, depth)] = mtp
        for name, total in self.losses.items():
            having = sum(name in layer.loss_weights for layer in self.layers.values())
            values[fill(AUXILIARY_LOSS, name)] = total / (self.micro_batches * having)
            values[fill(WEIGHTED_LOSS, name)] = self.weighted_sum(name) / self.micro_batches
        values[GRAD_NORM] = self.grad_norm
        return values


def merged_over_stages(record: StepRecord, pipeline: dist.ProcessGroup) -> StepRecord:
    """Return the record of the whole model from those of its stages, the same on every rank. Collective.

    `wanted_on_device` and `not_finite` stay those of this stage, `mtp_weight` that of the last one.
    """
    mine = replace(record, wanted_on_device={})
    stages: list[Any] = [None] * dist.get_world_size(pipeline)
    dist.all_gather_object(stages, mine, group=pipeline)
    losses: dict[str, float] = {}
    for name, value in (item for stage in stages for item in stage.losses.items()):
        losses[name] = losses.get(name, 0.0) + value
    layers = {number: layer for stage in stages for number, layer in stage.layers.items()}
    return replace(
        record,
        lm_sum=stages[-1].lm_sum,
        tokens=stages[-1].tokens,
        losses=losses,
        layers=dict(sorted(layers.items())),
        mtp=stages[-1].mtp,
        mtp_weight=stages[-1].mtp_weight,
        compute_seconds_R=[sum(each) for each in zip(*(s.compute_seconds_R for s in stages), strict=True)],
    )
