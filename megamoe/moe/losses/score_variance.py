"""`score_variance`: lets each expert's probability differ between tokens."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import most_candidates, sums_to_1
from megamoe.registry import register


@register("loss", "score_variance")
class ScoreVariance(Part):
    """-1/(E T) sum_te (p_te - mean_e)^2, mean_e the mean of p_e over the micro batch's tokens; at most 0.

    Source: Guo et al. 2025 (arXiv 2505.22323), variance loss L_v.

    Scope: micro batch; the run's loss is the mean over micro batches and data-parallel ranks.

    Caveats: the paper sums over the tokens; ours is their mean, so that the weight does not depend on the
    batch. It leaves open whether p of experts that were not chosen count; ours do. Its second loss is
    `output_orthogonality`.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.001

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        if most_candidates(moe) == 1 and sums_to_1(moe):
            raise ValueError("a mask leaves each token one expert, whose p is 1; leave the loss out")

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        probs_TE = routing.probs_TE
        num_tokens, num_experts = probs_TE.shape
        mean_E = probs_TE.sum(dim=0) / max(num_tokens, 1)
        return -(probs_TE - mean_E).square().sum() / (num_experts * max(num_tokens, 1))
