"""`importance`: every expert shall get the same sum of gating values."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.moe.losses.squared_cv import squared_cv
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "importance")
class Importance(Part):
    """CV(Importance)^2, Importance_i = sum over tokens of G_i(x); 0 at perfect balance, E - 1 at worst.

    G: the sparse gate, a wanted pair's weight and 0 where an expert was not chosen; SGMoE's is the
    softmax over the k scores kept (selector `top_k` with weights `kept_softmax`), and whatever the selector's
    weights are here. An expert that no token might choose counts as a 0. Source: Shazeer et al. 2017
    (SGMoE) eq. 6 and 7; variance as in tensor2tensor, of the population (divided by E); the PyTorch port in
    circulation divides by E - 1. Scope: micro batch; the run's loss is the mean of its values on the micro
    batches.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.1

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        """Weights that are not learned."""
        return {"fixed_weights": "whose sum teaches nothing"}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32; 0 without tokens."""
        wanted, num_experts = routing.wanted, routing.num_experts
        # Through [T, E]: sums straight into [E] would add up in another order each time on a GPU.
        score_function_TE = wanted.weight_N.new_zeros(routing.num_tokens * num_experts)
        score_function_TE = score_function_TE.scatter_add(
            0, wanted.token_N * num_experts + wanted.expert_N, wanted.weight_N
        )
        return squared_cv(score_function_TE.view(-1, num_experts).sum(dim=0))
