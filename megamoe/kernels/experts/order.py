"""Where the rows of each key end in a sorted list, which every implementation of the row passes needs, and of
each expert.
"""

import torch
from torch import Tensor


def ends_of(sorted_N: Tensor, size: int) -> Tensor:
    """Return where each of the keys 0 .. size-1 ends in an ascending list of keys, int64 [size]."""
    key_S = torch.arange(size, device=sorted_N.device, dtype=sorted_N.dtype)
    return torch.searchsorted(sorted_N, key_S, right=True)


def remember_ends(counts_E: Tensor, ends_E: Tensor) -> None:
    """Let counts, which nothing writes any more, know their running sum, for `ends_of_counts`."""
    counts_E.ends_E = ends_E  # type: ignore[attr-defined]


def ends_of_counts(counts_E: Tensor) -> Tensor:
    """Return where each expert's rows end, int64 [E]."""
    known: Tensor | None = getattr(counts_E, "ends_E", None)
    return counts_E.cumsum(0) if known is None else known
