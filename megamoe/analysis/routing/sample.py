"""The tokens of a data set that an analysis looks at one by one."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSample:
    """Some tokens of a data set, by their index: sample number * sequence length + position.

    index_S: int64, ascending, without repetition. The same data set and size give the same tokens, at any
    layout and for any checkpoint.
    """

    index_S: Tensor

    @classmethod
    def draw(cls, total: int, size: int) -> "TokenSample":
        """Return `size` of `total` tokens, evenly drawn with a fixed seed; all of them if there are fewer."""
        drawn = range(total) if size >= total else sorted(random.Random(0).sample(range(total), size))
        return cls(torch.tensor(list(drawn), dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.index_S)

    def find(self, index_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the tokens are in the sample, as (place in the sample, row in index_T).

        index_T: int64 token indices. Both results: int64 [M], on the CPU.
        """
        index_T = index_T.cpu()
        if not len(self):
            empty = torch.zeros(0, dtype=torch.int64)
            return empty, empty
        place_T = torch.searchsorted(self.index_S, index_T).clamp(max=len(self) - 1)
        row_M = (self.index_S[place_T] == index_T).nonzero().squeeze(1)
        return place_T[row_M], row_M
