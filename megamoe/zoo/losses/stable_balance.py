"""`stable_balance`: StableMoE's balance loss for phase 1."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import refuse_all_chosen, refuse_even_selector, sums_to_1
from megamoe.registry import register


@register("loss", "stable_balance")
class StableBalance(Part):
    """1/T sum_i (|A_i| - n) / n * sum_{t in A_i} p_ti; 0 at perfect balance; may be negative.

    A_i: the tokens whose selector chose expert i, without gradient. n: the mean of |A_i| over experts, T/E at
    k = 1. p: the score function's values, sigmoid(s) in the paper. An expert above the mean lowers its
    tokens' values; one below the mean raises them. The loss is 0 in phase 2 of the scorer `stable`; with
    another scorer, phase 1 never ends.

    Source: Dai et al. 2022 (StableMoE), section 3.1, alpha 0.3.

    Caveat: the paper's loss and its task loss are sums over tokens; ours are means, so alpha has the same
    meaning.

    Scope: micro batch; the run's loss is the mean over its micro batches.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss, the paper's alpha."""

        weight: float = 0.3

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_even_selector(moe)
        refuse_all_chosen(moe, by_candidates=sums_to_1(moe))  # other sums are free

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        wanted = routing.wanted
        mean = max(wanted.expert_N.numel(), 1) / routing.num_experts
        excess_E = routing.wanted_counts_E() / mean - 1
        value_N = routing.probs_TE[wanted.token_N, wanted.expert_N]
        loss = (excess_E[wanted.expert_N] * value_N).sum() / max(routing.num_tokens, 1)
        phase_1 = routing.extras.get("phase_1")
        return loss if phase_1 is None else loss * phase_1
