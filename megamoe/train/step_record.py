"""What one optimiser step showed, and its metrics."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megamoe.resilience.skipped_steps import Problem


@dataclass
class LayerRecord:
    """What one MoE layer saw in a step, over all ranks and micro batches.

    load_E, wanted_E: int64, pairs computed and wanted. width_D: int64 [E + 1], tokens by their number of
    computed experts. entropy, top_1: sums over tokens, see `Observation`. losses: sums over micro batches,
    unweighted. gradient_shares: of the losses that reach the scores, in steps that measure them, see
    `gradient_share`. own_numbers: of the parts, by `<part>/<name>`.
    """

    load_E: Tensor
    wanted_E: Tensor
    width_D: Tensor
    entropy: float = 0.0
    top_1: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    gradient_shares: dict[str, float] = field(default_factory=dict)
    own_numbers: dict[str, float] = field(default_factory=dict)


@dataclass
class StepRecord:
    """The sums of a step over the global batch.

    losses: each auxiliary loss, unweighted, summed over layers and micro batches; weighted: the sum of
    weight * loss over all of them. problem: why the step was not applied. not_finite: of this rank's micro
    batches, by their places, the samples whose lm loss is not finite. message: printed by the loop.
    wanted_on_device: `wanted_E` of every layer, on the device. ahead: the mean cross entropy of each depth of
    multi-token prediction; weight_ahead: of each of them in the loss. own_seconds_R: of each rank, its own
    time in the step before (`OwnTime`); 0: not measured.
    """

    lm_sum: float = 0.0
    tokens: float = 0.0
    micro_batches: int = 0
    weighted: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    loss_weights: dict[str, float] = field(default_factory=dict)
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    wanted_on_device: dict[int, Tensor] = field(default_factory=dict)
    ahead: list[float] = field(default_factory=list)
    weight_ahead: float = 0.0
    grad_norm: float = float("nan")
    problem: Problem | None = None
    not_finite: dict[int, list[int]] = field(default_factory=dict)
    message: str = ""
    own_seconds_R: list[float] = field(default_factory=list)

    @property
    def lm_loss(self) -> float:
        """Mean cross entropy of the unmasked tokens, nats."""
        return self.lm_sum / max(self.tokens, 1.0)

    @property
    def loss(self) -> float:
        """The lm loss plus the weighted losses of multi-token prediction and of the layers."""
        loss = self.lm_loss + self.weighted / max(self.micro_batches, 1)
        return loss + self.weight_ahead * sum(self.ahead)

    def metrics(self) -> dict[str, Any]:
        """Return the losses and the gradient norm under metrics.jsonl's names."""
        values: dict[str, Any] = {"train/lm_loss": self.lm_loss, "train/loss": self.loss}
        for depth, ahead in enumerate(self.ahead, 1):
            values[f"train/lm_loss/ahead_{depth}"] = ahead
        for name, total in self.losses.items():
            values[f"train/{name}"] = total / (self.micro_batches * len(self.layers))
            values[f"train/{name}/weighted"] = self.loss_weights[name] * total / self.micro_batches
        values["train/grad_norm"] = self.grad_norm
        return values
