"""Checks of equal values in Triton's interpreter; triton_checks.py runs them.

Its sums are NumPy's, which differ from PyTorch's in their last bits.
"""

from tests.moe.test_ties import PARTS, PRIORITIES, TOKENS, assert_hashed_ties, assert_same_pairs, both
from tests.support.kernels.interpreted import ON_TRITON
from tests.support.moe.build import make_hidden
from tests.support.moe.part_layers import moe_tree


def check_parts_choose_alike_where_scores_tie() -> None:
    for kind, name in PARTS:
        layers = both(moe_tree(kind, name), ON_TRITON)
        assert_same_pairs(layers, make_hidden(1).expand(TOKENS, -1).contiguous())


def check_ties_between_hashed_tokens() -> None:
    for priority in PRIORITIES:
        assert_hashed_ties(priority, ON_TRITON)
