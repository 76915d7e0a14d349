"""`z_loss`: keeps the scores small."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "z_loss")
class ZLoss(Part):
    """Mean over tokens of logsumexp(s)^2.

    Source: Zoph et al. 2022 (ST-MoE) eq. 5. Scope: a mean over tokens, so it does not depend on how
    the global batch is cut into micro batches.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 1e-3

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32; 0 without tokens."""
        return routing.scores_TE.logsumexp(dim=-1).square().sum() / max(routing.num_tokens, 1)
