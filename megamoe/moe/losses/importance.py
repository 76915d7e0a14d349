"""`importance`: balances the sum of gating values of every expert."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.moe.losses.common import squared_cv
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "importance")
class Importance(Part):
    """CV(Importance)^2, Importance_i = sum over tokens of G_i(x); 0 at perfect balance, at most E - 1.

    G: the sparse gate, which is a wanted pair's weight, and 0 for experts that were not chosen. SGMoE's G is
    the softmax over the k kept scores (selector `top_k` with weights `kept_softmax`); here G is the
    selector's weights, whichever they are. An expert that no token may choose counts as 0.

    Source: Shazeer et al. 2017 (SGMoE) eq. 6 and 7; variance as in tensor2tensor, of the population (divided
    by E); a common PyTorch port divides by E - 1.

    Scope: micro batch; the run's loss is the mean over its micro batches.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.1

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"fixed_weights": "whose sum teaches nothing"}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        wanted, num_experts = routing.wanted, routing.num_experts
        # Through [T, E]: index_add into [E] has no fixed order of summation on a GPU.
        cell_N = wanted.token_N * num_experts + wanted.expert_N
        gate_TE = wanted.weight_N.new_zeros(routing.num_tokens * num_experts)
        gate_TE = gate_TE.scatter_add(0, cell_N, wanted.weight_N).view(-1, num_experts)
        return squared_cv(gate_TE.sum(dim=0))
