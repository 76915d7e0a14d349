"""`threshold`: each token goes to the fewest experts whose probabilities reach a given sum."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.kernels.router import largest
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import WeightedByP, first_choices, num_candidates_T
from megamoe.registry import register

HEAD = 8  # an eighth of the experts is enough for most tokens; all are sorted for the others only


@register("selector", "threshold")
class Threshold(WeightedByP):
    """The smallest m of a token's best experts with p_1 + ... + p_m >= t; the weight is p.

    m varies by token and is at least 1: t = 0 behaves as top-1, t = 1 sends a token to all of its candidates.

    Source: Yang et al. 2024 (XMoE) section 3.2, eq. 5, algorithm 1.

    t is a share of the sum over all candidates: of 1 with a softmax, as in the paper; of less or more with a
    sigmoid or with a softmax over all experts under a mask. t = 1 is a separate case, because in fp32 a
    running sum may reach 1 early. A score function's bias shifts the order in which the p are summed, not the
    p. The priority p - i, which the paper combines with the threshold, is an option of the capacity; the
    capacity counts with k = 1 (eq. 3).
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

    @classmethod
    def takes_all(cls, options: Config, num_candidates: int) -> bool:
        return options.threshold == 1 or num_candidates <= 1

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return at least one pair per token and at most one per candidate."""
        head = -(-scored.num_experts // HEAD)
        head_TK = largest(scored.ranking_TE, head)
        count_T = self._count(scored, head_TK, slice(None))
        long_S = (count_T > head).nonzero().squeeze(1)
        if len(long_S) == 0:
            return first_choices(head_TK, count_T, scored.probs_TE)
        whole_SE = scored.ranking_TE[long_S].argsort(dim=-1, descending=True, stable=True)
        count_T[long_S] = self._count(scored, whole_SE, long_S)
        expert_TE = head_TK.new_empty(scored.num_tokens, scored.num_experts)
        expert_TE[:, :head] = head_TK
        expert_TE[long_S] = whole_SE
        return first_choices(expert_TE, count_T, scored.probs_TE)

    def _count(self, scored: Scored, expert_SK: Tensor, token_S: Tensor | slice) -> Tensor:
        """Return m of each token, int64 [S], given its best K experts; a number above K if more may be
        needed.
        """
        probs_SE = scored.probs_TE.detach()[token_S]
        candidates_SE = None if scored.candidates_TE is None else scored.candidates_TE[token_S]
        most_S = num_candidates_T(candidates_SE, probs_SE)
        if self._threshold == 1:
            return most_S
        # In fp64, where a sum of fp32 numbers does not depend on its order: a token is on the same side of
        # the threshold on every device.
        sum_SK = probs_SE.gather(1, expert_SK).double().cumsum(dim=-1)
        too_few_S = (sum_SK < self._threshold * probs_SE.double().sum(dim=-1, keepdim=True)).sum(dim=-1)
        return most_S.minimum(too_few_S + 1)

    @property
    def _threshold(self) -> float:
        if not self.training and self.config.eval_threshold is not None:
            return float(self.config.eval_threshold)
        return float(self.config.threshold)
