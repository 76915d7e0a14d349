"""`switch_balance`: the load-balancing loss of the Switch Transformer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.moe.part import Part
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "switch_balance")
class SwitchBalance(Part):
    """E * sum_i f_i P_i over the micro batch; 1 at perfect balance.

    f_i: the fraction of the wanted pairs that go to expert i, so that f sums to 1 for any number of
    experts a token (a constant: no gradient); with `first_choice`, of first choices alone. P_i: the
    mean of p_i. Source: Fedus et al. 2021 (Switch) eq. 4-6. Scope: micro batch; the run's loss is the
    mean of its values on the micro batches.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss. first_choice: count only each token's first choice."""

        weight: float = 0.01
        first_choice: bool = False

    def forward(self, routing: Routing) -> Tensor:
        """Scalar fp32; 0 without tokens."""
        expert_N = routing.wanted.expert_N
        if self.config.first_choice:
            expert_N = expert_N[routing.wanted.choice_N == 0]
        counts_E = torch.bincount(expert_N, minlength=routing.num_experts)
        fraction_E = counts_E.to(torch.float32) / max(expert_N.numel(), 1)
        mean_prob_E = routing.probs_TE.sum(dim=0) / max(routing.num_tokens, 1)
        return routing.num_experts * (fraction_E * mean_prob_E).sum()
