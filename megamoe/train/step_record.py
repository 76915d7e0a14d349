"""What one optimiser step showed, and its metrics."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megamoe.resilience.skipped_steps import Problem


@dataclass
class LayerLoad:
    """What one MoE layer saw in a step, over all ranks: int64 [E] pairs wanted and computed."""

    load_E: Tensor
    wanted_E: Tensor


@dataclass
class StepRecord:
    """The sums of a step over the global batch.

    losses: each auxiliary loss, unweighted, summed over layers and micro batches; weighted: the sum of
    weight * loss over all of them. problem: why the step was not applied. not_finite: of this rank's micro
    batches, by their places, the samples whose lm loss is not finite. message: printed by the loop.
    wanted_on_device: `wanted_E` of every layer, on the device.
    """

    lm_sum: float = 0.0
    tokens: float = 0.0
    micro_batches: int = 0
    weighted: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    layers: dict[int, LayerLoad] = field(default_factory=dict)
    wanted_on_device: dict[int, Tensor] = field(default_factory=dict)
    grad_norm: float = float("nan")
    problem: Problem | None = None
    not_finite: dict[int, list[int]] = field(default_factory=dict)
    message: str = ""

    @property
    def lm_loss(self) -> float:
        """Mean cross entropy of the unmasked tokens, nats."""
        return self.lm_sum / max(self.tokens, 1.0)

    @property
    def loss(self) -> float:
        """With the auxiliary losses, weighted and summed over layers."""
        return self.lm_loss + self.weighted / max(self.micro_batches, 1)

    def metrics(self) -> dict[str, Any]:
        """Under metrics.jsonl's names; an auxiliary loss as its mean over layers and micro batches."""
        values: dict[str, Any] = {
            "train/lm_loss": self.lm_loss,
            "train/loss": self.loss,
        }
        for name, total in self.losses.items():
            values[f"train/{name}"] = total / (self.micro_batches * len(self.layers))
        values["train/grad_norm"] = self.grad_norm
        for number, layer in self.layers.items():
            load, wanted = layer.load_E.double(), int(layer.wanted_E.sum())
            prefix = f"moe/layer_{number:02d}"
            values[f"{prefix}/load"] = layer.load_E.tolist()
            values[f"{prefix}/imbalance"] = float(load.max() / load.mean()) if load.sum() > 0 else 0.0
            values[f"{prefix}/dropped"] = 1 - float(load.sum()) / wanted if wanted else 0.0
        return values
