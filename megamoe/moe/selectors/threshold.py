"""`threshold`: each token goes to as many experts as it takes to gather a share of its gate values."""

from dataclasses import dataclass

from megamoe.moe.part import Selector, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import first_choices, num_candidates_T
from megamoe.registry import register


@register("selector", "threshold")
class Threshold(Selector):
    """The smallest m of a token's best experts with p_1 + ... + p_m >= t; the weight is p.

    m varies by token and is at least 1: t = 0 behaves as top-1, t = 1 sends a token to all of its
    candidates. Source: Yang et al. 2024 (XMoE) section 3.2, eq. 5, algorithm 1.

    The sum is measured against the sum over all candidates: 1 with a softmax, as in the paper; with a
    sigmoid, t is a share of it. t = 1 is a case of its own, for in fp32 a running sum reaches 1 early. A
    gate's bias shifts the order in which the p are summed, not the p. The priority p - i, which the paper
    names together with the threshold, is an option of the capacity; capacity counts with k = 1 (eq. 3).
    """

    @dataclass
    class Config:
        """threshold: t. eval_threshold: t in evaluation; default: the same."""

        threshold: float = 0.9
        eval_threshold: float | None = None

        def __post_init__(self) -> None:
            for option in ("threshold", "eval_threshold"):
                value = getattr(self, option)
                if value is not None and not 0 <= value <= 1:
                    raise ValueError(f"{option} must be at least 0 and at most 1")

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """At least one pair a token, at most its candidates; none for a token without any."""
        threshold = self.config.threshold
        if not self.training and self.config.eval_threshold is not None:
            threshold = self.config.eval_threshold
        expert_TE = scored.ranking_TE.argsort(dim=-1, descending=True, stable=True)
        count_T = num_candidates_T(scored.candidates_TE, scored.probs_TE)
        if threshold < 1:
            sum_TE = scored.probs_TE.detach().gather(1, expert_TE).cumsum(dim=-1)
            too_few_T = (sum_TE < threshold * sum_TE[:, -1:]).sum(dim=-1)
            count_T = count_T.minimum(too_few_T + 1)
        return first_choices(expert_TE, count_T, scored.probs_TE)
