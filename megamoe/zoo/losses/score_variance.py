"""`score_variance`: lets each expert's routing score differ between tokens."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.capabilities import capabilities
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import experts_wanted, most_candidates, sums_to_1
from megamoe.registry import register


@register("loss", "score_variance")
class ScoreVariance(Part):
    """-1/(E T) sum_te (s_te - mean_e)^2, mean_e the mean of s_e over the micro batch's tokens; at most 0.

    s: the weights of the experts that the selector chose, before the capacity, and 0 for the others. With
    `over: all`, s is p of all experts.

    Source: Guo et al. 2025 (arXiv 2505.22323), section 3.1, eq. 7, variance loss L_v; s by eq. 1.

    Scope: micro batch; the run's loss is the mean over micro batches and data-parallel ranks.

    Caveats: the paper sums over the tokens; ours is their mean, so that the weight does not depend on the
    batch. Its second loss is `output_orthogonality`.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss. over: the experts whose scores count, those that were chosen or
        all.
        """

        weight: float = 0.001
        over: Literal["chosen", "all"] = "chosen"

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        selector = capabilities(moe.router.selector)
        if options.over == "all":
            if most_candidates(moe) == 1 and sums_to_1(moe):
                raise ValueError("a mask leaves each token one expert, whose p is 1; leave the loss out")
        elif "fixed_weights" in selector:
            raise ValueError("the selector's weights have no gradient; set over: all, or leave the loss out")
        elif {"fixed_count", "normalised"} <= selector and experts_wanted(moe) == 1:
            raise ValueError(
                "a token has one expert, whose weight is 1; set over: all, or leave the loss out"
            )

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        scores_TE = routing.probs_TE
        if self.config.over == "chosen":
            wanted, none_TE = routing.wanted, routing.probs_TE.new_zeros(routing.probs_TE.shape)
            place_N = wanted.token_N * routing.num_experts + wanted.expert_N
            scores_TE = none_TE.flatten().index_add(0, place_N, wanted.weight_N).view_as(none_TE)
        num_tokens, num_experts = scores_TE.shape
        mean_E = scores_TE.sum(dim=0) / max(num_tokens, 1)
        return -(scores_TE - mean_E).square().sum() / (num_experts * max(num_tokens, 1))
