"""Checks of equal values in Triton's interpreter; triton_checks.py runs them.

Its sums are NumPy's, which differ from PyTorch's in their last bits.
"""

import torch

from megamoe.kernels.router import largest, top_k
from tests.moe.test_ties import PARTS, PRIORITIES, TOKENS, assert_hashed_ties, assert_same_pairs, both
from tests.support.kernels.interpreted import ON_TRITON
from tests.support.moe.build import make_hidden
from tests.support.moe.part_layers import moe_tree


def check_parts_choose_alike_where_scores_tie() -> None:
    for kind, name in PARTS:
        layers = both(moe_tree(kind, name), ON_TRITON)
        assert_same_pairs(layers, make_hidden(1).expand(TOKENS, -1).contiguous())


def check_the_largest_of_each_row() -> None:
    """Those of a stable sort: equal values, zeros of both signs, infinities, NaN, odd numbers of experts."""
    generator = torch.Generator().manual_seed(1)
    for tokens, experts, count in ((70, 8, 2), (5, 33, 6), (130, 64, 8), (1, 1, 1), (3, 200, 3)):
        ranking_TE = torch.randint(-3, 4, (tokens, experts), generator=generator).float()
        ranking_TE = torch.where(ranking_TE == 1, -0.0, ranking_TE)
        ranking_TE = torch.where(
            ranking_TE == 2, torch.randn(tokens, experts, generator=generator), ranking_TE
        )
        ranking_TE[0] = -torch.inf
        ranking_TE[-1, ::3] = torch.nan
        ranking_TE[-1, 1::5] = torch.inf
        assert torch.equal(top_k(ranking_TE, count, ON_TRITON), largest(ranking_TE, count)), (tokens, experts)


def check_ties_between_hashed_tokens() -> None:
    for priority in PRIORITIES:
        assert_hashed_ties(priority, ON_TRITON)
