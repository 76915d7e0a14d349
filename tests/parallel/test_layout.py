"""Who is in which group: tables written by hand, and Megatron-Core's own order of ranks."""

from itertools import product

import pytest
from megatron.core.parallel_state import RankGenerator

from megamoe.parallel.layout import Layout

SIZES = (1, 2, 4, 8)
LEGAL = [
    Layout(ranks, tensor, expert, expert_tensor)
    for ranks, tensor, expert, expert_tensor in product(SIZES, repeat=4)
    if ranks % tensor == ranks % (expert * expert_tensor) == 0
]
LEGAL += [Layout(6, 3, 2, 1), Layout(6, 2, 3, 1), Layout(12, 2, 3, 2), Layout(12, 3, 2, 2)]
ORDER = "tp-cp-ep-dp-pp"  # the default of `initialize_model_parallel`


def test_eight_ranks_by_hand() -> None:
    """Two copies of the experts, each on 2 expert-parallel x 2 slices; 4 data-parallel ranks of 2."""
    layout = Layout(8, tensor=2, expert=2, expert_tensor=2)
    assert (layout.data, layout.expert_ranks, layout.expert_copies) == (4, 4, 2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.tensor_rank(rank) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [layout.expert_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.expert_tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(layout.expert_groups()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.expert_holder_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.expert_copy_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_experts_across_tensor_ranks_by_hand() -> None:
    """Tensor 4 and no slices: the four tensor ranks of a micro batch hold two copies of two parts."""
    layout = Layout(8, tensor=4, expert=2)
    assert (layout.data, layout.expert_ranks, layout.expert_copies) == (2, 2, 4)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.tensor_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.expert_rank(rank) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert layout.expert_groups() == layout.expert_holder_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.expert_tensor_groups() == [[rank] for rank in range(8)]
    assert layout.expert_copy_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("layout", LEGAL, ids=str)
def test_the_order_is_megatrons(layout: Layout) -> None:
    dense = RankGenerator(tp=layout.tensor, ep=1, dp=layout.data, pp=1, cp=1, order=ORDER)
    for group in dense.get_ranks("tp"):
        assert len({layout.data_rank(rank) for rank in group}) == 1
        assert [layout.tensor_rank(rank) for rank in group] == list(range(layout.tensor))
    for group in dense.get_ranks("dp"):
        assert len({layout.tensor_rank(rank) for rank in group}) == 1
        assert [layout.data_rank(rank) for rank in group] == list(range(layout.data))
    copies = layout.expert_copies
    experts = RankGenerator(tp=layout.expert_tensor, ep=layout.expert, dp=copies, pp=1, cp=1, order=ORDER)
    assert sorted(experts.get_ranks("ep")) == sorted(layout.expert_groups())
    assert sorted(experts.get_ranks("tp")) == layout.expert_tensor_groups()
    assert sorted(experts.get_ranks("tp-ep")) == layout.expert_holder_groups()
    assert sorted(experts.get_ranks("dp")) == layout.expert_copy_groups()
    for group in layout.expert_groups():  # in the order of what they hold: the all-to-all counts on it
        assert [layout.expert_rank(rank) for rank in group] == list(range(layout.expert))
    for group in layout.expert_tensor_groups() + layout.expert_copy_groups():
        assert len({layout.expert_rank(rank) for rank in group}) == 1
