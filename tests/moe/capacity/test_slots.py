"""CapacitySlots by priority against Python's sorted."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megamoe.moe.capacity.slots import place_in_group, share_of_pairs, value_of_pairs
from tests.support.moe.build import make_pairs


def plain_places(group_N: Tensor, rank_N: Tensor | None, value_N: Tensor | None) -> list[int]:
    """Each group's pairs sorted by a Python key, which compares rank, value and place in the list in turn."""
    slots = [0] * len(group_N)
    for group in set(group_N.tolist()):
        members = [n for n in range(len(group_N)) if group_N[n] == group]
        members.sort(
            key=lambda n: (
                0 if rank_N is None else int(rank_N[n]),
                0.0 if value_N is None else -float(value_N[n]),
                n,
            )
        )
        for place, n in enumerate(members):
            slots[n] = place
    return slots


@pytest.mark.parametrize("with_rank", [False, True])
@pytest.mark.parametrize("with_value", [False, True])
def test_places_are_those_of_a_plain_sort(with_rank: bool, with_value: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    group_N = torch.randint(0, 5, (200,), generator=generator)
    rank_N = torch.randint(0, 3, (200,), generator=generator) if with_rank else None
    # Below 0, both zeros, equal ones, and two of which fp32 would see no difference after p - i.
    choices = torch.tensor([-2.5, -1e-30, -0.0, 0.0, 1e-38, 0.25, 0.25 + 2**-24, 0.5, 3e38])
    value_N = choices[torch.randint(0, len(choices), (200,), generator=generator)] if with_value else None
    assert place_in_group(group_N, 6, rank_N, value_N).tolist() == plain_places(group_N, rank_N, value_N)


def test_the_largest_groups_and_ranks_do_not_run_into_each_other() -> None:
    group_N = torch.tensor([2**15 - 1, 2**15 - 2, 2**15 - 1, 2**15 - 2])
    rank_N = torch.tensor([0, 2**16 - 1, 2**16 - 1, 0])
    value_N = torch.tensor([-3e38, 3e38, 3e38, -3e38])
    assert place_in_group(group_N, 2**15, rank_N, value_N).tolist() == [0, 1, 1, 0]
    assert place_in_group(group_N[:0], 3).tolist() == []


def test_the_value_of_a_pair_is_its_entry() -> None:
    values_TE = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], requires_grad=True)
    value_N = value_of_pairs(values_TE, make_pairs([[2, 0], [1]]))
    torch.testing.assert_close(value_N, torch.tensor([0.3, 0.1, 0.5]))
    assert not value_N.requires_grad


def test_a_share_is_a_ceiling_of_the_factor_as_written() -> None:
    assert [share_of_pairs(*case) for case in [(1.1, 100, 10), (1.0, 9, 4), (0.5, 8, 4)]] == [11, 3, 1]


@pytest.mark.parametrize("factor", [4 / 3, 5 / 3, 0.3333333333333333, 1.1, 2.0])
@pytest.mark.parametrize("num_pairs", [512, 1024, 1 << 20])
def test_a_share_of_groups_that_the_device_counts_is_that_of_a_number(factor: float, num_pairs: int) -> None:
    """A factor of many digits is a fraction of numbers beyond int64."""
    for groups in (1, 7, 64, 1024):
        exact = math.ceil(Fraction(str(factor)) * num_pairs / groups)
        found = share_of_pairs(factor, num_pairs, torch.tensor(groups))
        assert isinstance(found, Tensor) and found.dtype == torch.int64
        assert int(found) == share_of_pairs(factor, num_pairs, groups) == exact
