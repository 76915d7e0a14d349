"""What selectors share: base classes, and pairs of tokens with different numbers of experts.

Shape suffixes as in `routing`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import SMALL_TOTAL, SMALLEST_TOTAL, none_small, shares
from megamoe.moe.part import Selector, StepContext
from megamoe.moe.process_groups import gather_unequal_rows, rank_in
from megamoe.moe.routing import LOWEST, Pairs, Scored
from megamoe.moe.validation import refuse_more_than_experts


class WeightedByP(Selector):
    """Base class of selectors whose pairs are weighted with p."""

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Return the pairs of these choices, weighted with p."""
        return first_choices(expert_TK, count_T, scored.probs_TE)


class FixedK(WeightedByP):
    """Base class of selectors that choose k experts for every token, an option; k is at most E."""

    @dataclass
    class Config:
        """k: experts per token."""

        k: int = 1

        def __post_init__(self) -> None:
            if self.k < 1:
                raise ValueError("k must be at least 1")

    @classmethod
    def check(cls, options: Any, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_more_than_experts("k", options.k, moe)

    @property
    def num_choices(self) -> int:
        return int(self.config.k)


def first_choices(expert_TK: Tensor, count_T: Tensor, probs_TE: Tensor) -> Pairs:
    """Return the pairs of each token's first `count_T` (int64, at most K) experts of `expert_TK`, weighted
    with p.

    Entries of `expert_TK` after a token's count are ignored.
    """
    token_T = torch.arange(len(count_T), device=count_T.device)
    token_N = torch.repeat_interleave(token_T, count_T)
    first_T = count_T.cumsum(0) - count_T
    choice_N = torch.arange(len(token_N), device=token_N.device) - first_T[token_N]
    expert_N = expert_TK[token_N, choice_N]
    return Pairs(token_N, expert_N, probs_N(probs_TE, token_N, expert_N), choice_N)


def valid_TK(expert_TK: Tensor, count_T: Tensor) -> Tensor | None:
    """Return which columns of each token are among its first `count_T`, bool; None if all tokens have all."""
    column_K = torch.arange(expert_TK.shape[1], device=expert_TK.device)
    kept_TK = column_K < count_T[:, None]
    return None if bool(kept_TK.all()) else kept_TK


def only_valid(value_TK: Tensor, kept_TK: Tensor | None, other: float = 0.0) -> Tensor:
    """Return the values with `other` where they are not kept; None: all are."""
    return value_TK if kept_TK is None else value_TK.masked_fill(~kept_TK, other)


def chosen_shares_TK(scored: Scored, expert_TK: Tensor, kept_TK: Tensor | None, best: bool = False) -> Tensor:
    """Return p of the chosen experts over their sum, [T, K]; of those that are not kept 0, in a row that has
    others. best: see `Scored.small_slope`.
    """
    slope = scored.small_slope(best)
    prob_TK = only_valid(scored.probs_TE.gather(1, expert_TK), kept_TK)
    if slope is None:
        return shares(prob_TK, None)
    return shares(prob_TK, lambda: only_valid(slope * scored.scores_TE.gather(1, expert_TK), kept_TK, LOWEST))


def shares_N(
    value_N: Tensor, logs: Callable[[], Tensor] | None, group_N: Tensor, num_groups: int, scale: float
) -> Tensor:
    """Return scale * each value over the sum of its group, [N]; logs: see `kernels.router.shares`."""

    def sums_N(term_N: Tensor) -> Tensor:
        total_G = term_N.new_zeros(num_groups).index_add(0, group_N, term_N)
        return total_G.index_select(0, group_N)

    total_N = sums_N(value_N)
    share_N = scale * value_N / total_N.clamp_min(SMALLEST_TOTAL)
    if logs is None or none_small(total_N):
        return share_N
    log_N = logs()
    top_G = log_N.new_full((num_groups,), LOWEST).scatter_reduce(0, group_N, log_N.detach(), "amax")
    power_N = (log_N - top_G.index_select(0, group_N)).exp()
    return torch.where(total_N < SMALL_TOTAL, scale * power_N / sums_N(power_N), share_N)


def whole_batch(value_TE: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """Return the rows of all data-parallel ranks' tokens in the order of the data, and which of them are this
    rank's, int64 [T]; without gradient. All ranks of the data group must call it.
    """
    values, first, index_T = [value_TE], 0, context.token_index(len(value_TE), value_TE.device)
    if context.data_group is not None:
        values = gather_unequal_rows(value_TE, context.data_group)
        first = sum(map(len, values[: rank_in(context.data_group)]))
        index_T = torch.cat(gather_unequal_rows(index_T, context.data_group))
    order_X = index_T.argsort(stable=True)
    return torch.cat(values)[order_X], order_X.argsort()[first : first + len(value_TE)]


def probs_N(probs_TE: Tensor, token_N: Tensor, expert_N: Tensor) -> Tensor:
    """Return probs_TE[token_N, expert_N], [N], for distinct pairs; its backward on GPU needs no sort."""
    return probs_TE.reshape(-1).index_select(0, token_N * probs_TE.shape[1] + expert_N)


def num_candidates_T(candidates_TE: Tensor | None, probs_TE: Tensor) -> Tensor:
    """Return how many experts each token may choose from, int64 [T]."""
    if candidates_TE is None:
        return torch.full(probs_TE.shape[:1], probs_TE.shape[1], device=probs_TE.device)
    return candidates_TE.sum(dim=1)
