"""`batchwise_threshold`: teaches the thresholds of `strictly_balanced`."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "batchwise_threshold")
class BatchwiseThreshold(Part):
    """Mean over tokens of sum_i (M_threshold,i - M_batchwise,i) (p_i - t_i); t: the selector's thresholds.

    M_threshold,i = 1 if p_i > t_i; M_batchwise has the wanted pairs. No term is negative, and all are 0 where
    both masks agree. The masks have no gradient; p and t have.

    Source: Shazeer et al. 2017 (SGMoE), appendix F, eq. 20, which is a sum over tokens and has no weight.

    Scope: a mean over tokens; the masks are those of the micro batches of all ranks together.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 1.0

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"threshold_E": "which it teaches"}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        wanted, probs_TE = routing.wanted, routing.probs_TE
        margin_TE = probs_TE - routing.extras["threshold_E"]
        too_many_TE = (margin_TE.detach() > 0).float()
        too_many_TE.view(-1)[wanted.token_N * routing.num_experts + wanted.expert_N] -= 1
        return (too_many_TE * margin_TE).sum() / max(routing.num_tokens, 1)
