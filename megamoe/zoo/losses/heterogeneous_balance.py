"""`heterogeneous_balance`: balance between experts that compute and experts that do not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.losses.common import probs_shares
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "heterogeneous_balance")
class HeterogeneousBalance(Part):
    """sum_i eta_i f_i P_i over all experts: eta is 1 of those that compute, and tau of the others.

    f_i: pairs that the selector chose for expert i over tokens. P_i: mean p of it over tokens; p is divided
    by the token's sum if that is not 1 (no softmax, or one over all experts under a mask). A smaller tau
    sends more tokens to the experts without computation (`moe.zero_experts`): at rest an expert of them has
    1 / tau times the load of one that computes. Scope: the micro batch.

    Source: Jin et al. 2024 (MoE++, arXiv 2410.07348), eq. 7; tau 0.75 is one of its table 3, and the weight
    (beta of eq. 9) was not at hand.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss. tau: see the class."""

        weight: float = 0.01
        tau: float = 0.75

        def __post_init__(self) -> None:
            if not self.tau > 0:
                raise ValueError("tau must be positive")

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        if moe.zero_experts.total == 0:
            raise ValueError("every expert computes; set moe.zero_experts, or take the loss switch_balance")

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32; 0 if there are no tokens."""
        tokens = max(routing.num_tokens, 1)
        real = self.dims.num_experts - self.dims.num_zero
        share_E = routing.wanted_counts_E() / tokens
        number_E = torch.arange(self.dims.num_experts, device=share_E.device)
        share_E = torch.where(number_E < real, share_E, self.config.tau * share_E)
        return (share_E * probs_shares(routing, self.dims.score_function).sum(0)).sum() / tokens
