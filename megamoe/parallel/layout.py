"""Which rank does what: tensor, data, expert and expert tensor parallelism over one set of ranks."""

from dataclasses import dataclass

from megamoe.config.schema import ParallelConfig


@dataclass(frozen=True)
class Layout:
    """Two ways to see the same ranks, both in the order of Megatron-Core.

    The model but its routed experts:  rank = data_rank * tensor + tensor_rank
    The routed experts:                rank = (copy * expert + expert_rank) * expert_tensor + slice

    The first says who holds which slice of attention and dense FFNs, and who reads which data; the second,
    who holds which slice of which experts. Every rank has tokens of its own in an MoE layer, so that the
    second need not know the first.
    """

    ranks: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, ranks: int) -> "Layout":
        """As configured; whether it is legal is not asked here."""
        return cls(ranks, config.tensor, config.expert, config.expert_tensor)

    @property
    def data(self) -> int:
        """Data-parallel size: how many micro batches are under way."""
        return self.ranks // self.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts once between them."""
        return self.expert * self.expert_tensor

    @property
    def expert_copies(self) -> int:
        """How many ranks hold the same slice of the same experts."""
        return self.ranks // self.expert_ranks

    def data_rank(self, rank: int) -> int:
        """Whose micro batches it works on."""
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Which slice of the dense weights it holds."""
        return rank % self.tensor

    def expert_rank(self, rank: int) -> int:
        """Which experts it holds."""
        return rank // self.expert_tensor % self.expert

    def expert_groups(self) -> list[list[int]]:
        """Ranks that hold different experts, of the same slice."""
        return [
            [first + number * self.expert_tensor for number in range(self.expert)]
            for copy in range(self.expert_copies)
            for first in range(copy * self.expert_ranks, copy * self.expert_ranks + self.expert_tensor)
        ]

    def expert_tensor_groups(self) -> list[list[int]]:
        """Ranks that hold the slices of the same experts."""
        return _runs(self.ranks, self.expert_tensor)

    def expert_holder_groups(self) -> list[list[int]]:
        """Ranks that hold all experts once between them."""
        return _runs(self.ranks, self.expert_ranks)

    def expert_copy_groups(self) -> list[list[int]]:
        """Ranks that hold the same."""
        return [list(range(place, self.ranks, self.expert_ranks)) for place in range(self.expert_ranks)]


def _runs(ranks: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, ranks, size)]
