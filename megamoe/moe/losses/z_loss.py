"""`z_loss`: penalises large scores."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megamoe.kernels.router import mean_squared_log_sum
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "z_loss")
class ZLoss(Part):
    """Mean over tokens of logsumexp(s)^2.

    Source: Zoph et al. 2022 (ST-MoE) eq. 5.

    Scope: a mean over tokens, so it does not depend on how the global batch is cut into micro batches of
    equally many tokens.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss. over_layers: the layers' losses are added, or their mean is."""

        weight: float = 1e-3
        over_layers: Literal["sum", "mean"] = "sum"

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"log_probs": "whose logsumexp is always 0, and the loss teaches nothing"}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        return mean_squared_log_sum(routing.scores_TE, self.dims.kernels)
