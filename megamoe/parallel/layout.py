"""The layout of the ranks: tensor, data, expert and expert tensor parallelism."""

import math
from dataclasses import dataclass

from megamoe.config.schema import ParallelConfig


def fewest_ranks(config: ParallelConfig) -> int:
    """Return the smallest number of ranks that both divisions of a configuration fit."""
    return math.lcm(config.tensor, config.expert * config.expert_tensor)


@dataclass(frozen=True)
class Layout:
    """Two divisions of the same ranks, both in Megatron-Core's order.

    Outside of the routed experts:  rank = data_rank * tensor + tensor_rank
    The routed experts:             rank = (copy * expert + expert_rank) * expert_tensor + slice

    The first says which slice of attention and dense FFNs a rank holds and which data it reads; the second,
    which slice of which experts it holds. Every rank has its own tokens in an MoE layer, so the two are
    independent.
    """

    ranks: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, ranks: int) -> "Layout":
        """Return the configured layout; it is not checked here."""
        return cls(ranks, config.tensor, config.expert, config.expert_tensor)

    @property
    def data(self) -> int:
        """The data-parallel size: the number of micro batches computed at a time."""
        return self.ranks // self.tensor

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that together hold all experts once."""
        return self.expert * self.expert_tensor

    @property
    def expert_copies(self) -> int:
        """The number of ranks that hold the same slice of the same experts."""
        return self.ranks // self.expert_ranks

    def data_rank(self, rank: int) -> int:
        """Return the rank's data-parallel rank, which selects its micro batches."""
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Return the rank's tensor-parallel rank, which selects its slice of the dense weights."""
        return rank % self.tensor

    def expert_rank(self, rank: int) -> int:
        """Return the rank's expert-parallel rank, which selects its experts."""
        return rank // self.expert_tensor % self.expert

    def expert_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold different experts, in the same slice."""
        return [
            [first + number * self.expert_tensor for number in range(self.expert)]
            for copy in range(self.expert_copies)
            for first in range(copy * self.expert_ranks, copy * self.expert_ranks + self.expert_tensor)
        ]

    def expert_tensor_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold the slices of the same experts."""
        return _runs(self.ranks, self.expert_tensor)

    def expert_holder_groups(self) -> list[list[int]]:
        """Return the groups of ranks that together hold all experts once."""
        return _runs(self.ranks, self.expert_ranks)

    def expert_copy_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold the same slice of the same experts."""
        return [list(range(place, self.ranks, self.expert_ranks)) for place in range(self.expert_ranks)]


def _runs(ranks: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, ranks, size)]
