"""Pairs where each token takes a number of experts of its own; shapes as in `routing`."""

import torch
from torch import Tensor

from megamoe.moe.routing import Pairs

# Of the chosen values, under which their weights fade to 0: fp32's own smallest would overflow in backward.
SMALLEST_TOTAL = 1e-20


def first_choices(expert_TK: Tensor, count_T: Tensor, probs_TE: Tensor) -> Pairs:
    """Each token's first `count_T` (int64, at most K) of `expert_TK`, weighted with p.

    What stands behind a token's count is not looked at.
    """
    token_T = torch.arange(len(count_T), device=count_T.device)
    token_N = torch.repeat_interleave(token_T, count_T)
    first_T = count_T.cumsum(0) - count_T
    choice_N = torch.arange(len(token_N), device=token_N.device) - first_T[token_N]
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
