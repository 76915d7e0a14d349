"""Limited slots, assigned by priority."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from megamoe.moe.routing import Pairs, count

# One sort of an integer key is several times as fast as a sort of fp32 values, or as two sorts.
GROUP_SHIFT, RANK_SHIFT = 48, 32
MAX_GROUPS = 1 << 15


def place_in_group(
    group_N: Tensor, num_groups: int, rank_N: Tensor | None = None, value_N: Tensor | None = None
) -> Tensor:
    """Return how many pairs of the same group (an expert, a device) come before each, int64 [N].

    A group's pairs are ordered by rank_N (int64, from 0 to 2^16 - 1, the lower first), then by value_N (fp32,
    the larger first), then as listed. group_N: int64, from 0 to num_groups - 1.
    """
    assert num_groups <= MAX_GROUPS, f"{num_groups} groups, expected at most {MAX_GROUPS}"
    key_N = group_N << GROUP_SHIFT
    if rank_N is not None:
        key_N = key_N + (rank_N << RANK_SHIFT)
    if value_N is not None:
        key_N = key_N + _descending(value_N)
    sorted_key_N, order_N = torch.sort(key_N, stable=True)
    counts_G = count(group_N, num_groups)
    start_G = counts_G.cumsum(0) - counts_G
    here_N = torch.arange(group_N.numel(), device=group_N.device)
    return torch.empty_like(group_N).index_copy_(0, order_N, here_N - start_G[sorted_key_N >> GROUP_SHIFT])


def share_of_pairs(factor: float, num_pairs: int, num_groups: int | Tensor) -> int | Tensor:
    """Return ceil(factor * num_pairs / num_groups), with the factor as a decimal: in floats 1.1 * 100 / 10
    exceeds 11.

    num_groups: a number, or an int64 scalar if it was counted on the device.
    """
    # ceil(x / n) is ceil(ceil(x) / n) for whole n. The fraction of a factor such as 4/3 exceeds int64.
    whole = math.ceil(Fraction(str(factor)) * num_pairs)
    return (whole + num_groups - 1) // num_groups


def num_open(open_E: Tensor | None, num_groups: int) -> int | Tensor:
    """Return how many groups of neighbouring experts are open in this step, at least 1; an int64 scalar, or
    all.

    open_E: bool, the experts that the step-wide masks left (`Scored.open_E`). Masks that depend on the token
    are ignored: the router decides what they close, and a limit must not grow as the router collapses.
    """
    if open_E is None:
        return num_groups
    return open_E.view(num_groups, -1).any(dim=1).sum().clamp_min(1)


def value_of_pairs(values_TE: Tensor, pairs: Pairs) -> Tensor:
    """Return each pair's entry of [T, E], fp32 [N] without gradient."""
    return values_TE.detach().reshape(-1)[pairs.token_N * values_TE.shape[1] + pairs.expert_N]


def _descending(value_N: Tensor) -> Tensor:
    """Return int64 keys from 0 to 2^32 - 1, smaller for larger values and equal for equal ones.

    The bits of a positive float, read as an integer, have the float's order; those of a negative one the
    reverse.
    """
    bits_N = (value_N.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ascending_N = bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)
    return 0x7FFFFFFF - ascending_N.long()
