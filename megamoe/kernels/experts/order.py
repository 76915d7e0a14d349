"""Where the rows of each key end in a sorted list, which every implementation of the row passes needs."""

import torch
from torch import Tensor


def ends_of(sorted_N: Tensor, size: int) -> Tensor:
    """Return where each of the keys 0 .. size-1 ends in an ascending list of keys, int64 [size]."""
    key_S = torch.arange(size, device=sorted_N.device, dtype=sorted_N.dtype)
    return torch.searchsorted(sorted_N, key_S, right=True)
