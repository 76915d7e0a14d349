"""`expert_choice`: the experts choose their tokens."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.choice import Kernels
from megamoe.kernels.router import largest
from megamoe.moe.capacity.slots import num_open
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored, count
from megamoe.moe.selectors.choices import WeightedByP, probs_N
from megamoe.moe.validation import refuse_more_than_experts
from megamoe.registry import register


@register("selector", "expert_choice")
class ExpertChoice(WeightedByP):
    """Each expert takes its C = ceil(k * T / E) best tokens by p; the weight is p.

    The load is even by construction. A token has between 0 and E experts, k on average. Its first choice is
    the expert with the largest p among those that took it. T is the micro batch of one data-parallel rank. An
    expert with fewer than C candidates takes all of them. E counts the experts that the step-wide masks leave
    open, as in the capacity `per_expert`: under expert dropout a token has k of them on average, too.

    Source: Zhou et al. 2022, Mixture-of-Experts with Expert Choice Routing (their e, n, c and k are E, T, k
    and C; the paper does not say how C is rounded).

    With a softmax an expert compares tokens by p, because the scores of different tokens do not compare. With
    a sigmoid it compares them by the scores, which have the same order but do not round to 1 or 0 in fp32.

    Not causal: whether an expert takes a token depends on later tokens and on other sequences. A decoder sees
    the future in training and cannot generate token by token as it was trained. It is refused there without
    `allow_non_causal`; an encoder may use it.
    """

    experts_alike = True

    @dataclass
    class Config:
        """k: mean experts per token, the paper's capacity factor c. allow_non_causal: accept in
        a decoder that the choice is not causal.
        """

        k: float = 2.0
        allow_non_causal: bool = False

        def __post_init__(self) -> None:
            if not self.k > 0:
                raise ValueError("k must be positive")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        provided = {"even_load", "by_experts", "over_tokens"}
        return provided if options.allow_non_causal else provided | {"sees_later_tokens"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"dropless": "since each expert takes a fixed number of tokens"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"bias": "but it would be the same for all tokens among which an expert chooses"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_more_than_experts("k", options.k, moe)

    @property
    def mean_choices(self) -> float:
        """The mean number of experts per token."""
        return float(self.config.k)

    def slots(self, num_tokens: int, open_E: Tensor | None = None) -> int:
        """Return C, the number of tokens of each expert; with open_E (see `Scored`) the host waits for it."""
        num_experts = int(num_open(open_E, self.dims.num_experts))
        return min(math.ceil(Fraction(str(self.config.k)) * num_tokens / num_experts), num_tokens)

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """C * E pairs, fewer where masks leave an expert too few candidates."""
        slots = self.slots(scored.num_tokens, scored.open_E)
        best_EC = largest(_values_TE(scored, self.dims.kernels).T, slots)
        expert_E1 = torch.arange(len(best_EC), device=best_EC.device)[:, None]
        token_N, expert_N = best_EC.reshape(-1), expert_E1.expand_as(best_EC).reshape(-1)
        if scored.candidates_TE is not None:
            kept_N = scored.candidates_TE[token_N, expert_N].nonzero().squeeze(1)
            token_N, expert_N = token_N[kept_N], expert_N[kept_N]
        # By token, then p, then expert: each sort keeps the order of the one before.
        by_p_N = scored.ranking_TE[token_N, expert_N].argsort(descending=True, stable=True)
        order_N = by_p_N[token_N[by_p_N].argsort(stable=True)]
        token_N, expert_N = token_N[order_N], expert_N[order_N]
        count_T = count(token_N, scored.num_tokens)
        first_T = count_T.cumsum(0) - count_T
        choice_N = torch.arange(len(token_N), device=token_N.device) - first_T[token_N]
        return Pairs(token_N, expert_N, probs_N(scored.probs_TE, token_N, expert_N), choice_N)


def _values_TE(scored: Scored, kernels: Kernels) -> Tensor:
    """What an expert's tokens are compared by; -inf where it is no candidate."""
    if not scored.ranked_by_scores:
        return scored.ranking_TE
    return scored.of_candidates_TE(scored.across_tokens_TE(scored.probs_TE), float("-inf"), kernels)
