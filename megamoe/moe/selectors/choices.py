"""Pairs where each token takes a number of experts of its own; shapes as in `routing`."""

import torch
from torch import Tensor

from megamoe.moe.routing import Pairs


def first_choices(expert_TK: Tensor, count_T: Tensor, probs_TE: Tensor) -> Pairs:
    """Each token's first `count_T` (int64, at most K) of `expert_TK`, weighted with p.

    The pairs are picked by a mask, so that nothing but it is as large as [T, K] where K is E.
    """
    rank_K = torch.arange(expert_TK.shape[1], device=expert_TK.device)
    token_N, choice_N = (rank_K < count_T[:, None]).nonzero(as_tuple=True)
    expert_N = expert_TK[token_N, choice_N]
    return Pairs(token_N, expert_N, probs_N(probs_TE, token_N, expert_N), choice_N)


def probs_N(probs_TE: Tensor, token_N: Tensor, expert_N: Tensor) -> Tensor:
    """[N]: probs_TE[token_N, expert_N] of pairs that differ, without the sort of its backward on a GPU."""
    return probs_TE.reshape(-1).index_select(0, token_N * probs_TE.shape[1] + expert_N)


def num_candidates_T(candidates_TE: Tensor | None, probs_TE: Tensor) -> Tensor:
    """int64 [T]: how many experts each token may choose from."""
    if candidates_TE is None:
        return torch.full(probs_TE.shape[:1], probs_TE.shape[1], device=probs_TE.device)
    return candidates_TE.sum(dim=1)
