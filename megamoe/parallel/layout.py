"""The layout of the ranks: pipeline, data, context, tensor, expert and expert tensor parallelism."""

import math
from dataclasses import dataclass

from megamoe.config.schema import ParallelConfig


def fewest_ranks(config: ParallelConfig) -> int:
    """Return the smallest number of ranks that both divisions of a configuration fit."""
    of_stage = math.lcm(config.context * config.tensor, config.expert * config.expert_tensor)
    return config.pipeline * of_stage


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Layout:
    """Two divisions of the same ranks, both in Megatron-Core's order.

    Outside of the routed experts:  rank = ((stage * data + data_rank) * context + context_rank) * tensor
                                           + tensor_rank
    The routed experts:             rank = ((stage * copies + copy) * expert + expert_rank) * expert_tensor
                                           + slice

    The first says which blocks, which slice of attention and dense FFNs, and which part of a sequence a rank
    has, and which data it reads; the second, which slice of which experts it holds. Every rank has its own
    tokens in an MoE layer, so the two are independent within a pipeline stage (Megatron-Core's parallel
    folding). No group of experts crosses stages.

    nodes: those between which the rows of an expert group are exchanged by node; 1: rows go straight to the
    ranks of their experts, see `megamoe.parallel.exchange`.
    """

    ranks: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    context: int = 1
    nodes: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, ranks: int) -> "Layout":
        """Return the configured layout; it is not checked here."""
        return cls(ranks, config.tensor, config.expert, config.expert_tensor, config.pipeline, config.context)

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of one pipeline stage, which are consecutive."""
        return self.ranks // self.pipeline

    @property
    def is_whole(self) -> bool:
        """Whether pipeline, context and tensor parallelism divide the ranks."""
        return self.ranks % (self.pipeline * self.context * self.tensor) == 0

    @property
    def data(self) -> int:
        """The data-parallel size: the number of micro batches computed at a time by a stage."""
        return self.stage_ranks // self.batch_ranks

    @property
    def batch_ranks(self) -> int:
        """The number of ranks of a stage over which the tokens of one micro batch are spread."""
        return self.context * self.tensor

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same slice of the same dense weights."""
        return self.stage_ranks // self.tensor

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that together hold all experts of a stage once."""
        return self.expert * self.expert_tensor

    @property
    def expert_copies(self) -> int:
        """The number of ranks that hold the same slice of the same experts."""
        return self.stage_ranks // self.expert_ranks

    def pipeline_rank(self, rank: int) -> int:
        """Return the rank's pipeline stage."""
        return rank // self.stage_ranks

    def data_rank(self, rank: int) -> int:
        """Return the rank's data-parallel rank, which selects its micro batches."""
        return rank % self.stage_ranks // self.batch_ranks

    def tensor_rank(self, rank: int) -> int:
        """Return the rank's tensor-parallel rank, which selects its slice of the dense weights."""
        return rank % self.tensor

    def expert_rank(self, rank: int) -> int:
        """Return the rank's expert-parallel rank, which selects its experts."""
        return rank // self.expert_tensor % self.expert

    def stage_groups(self) -> list[list[int]]:
        """Return the groups of ranks that form a pipeline stage."""
        return _groups(self.ranks, self.stage_ranks)

    def pipeline_groups(self) -> list[list[int]]:
        """Return the groups of ranks that have the same place in each stage, in the order of the stages."""
        return _groups(self.ranks, self.ranks, self.stage_ranks)

    def data_groups(self) -> list[list[int]]:
        """Return the groups of ranks whose micro batches form the batch, and that differ in nothing else."""
        return _groups(self.ranks, self.stage_ranks, self.batch_ranks)

    def context_groups(self) -> list[list[int]]:
        """Return the groups of ranks that have the parts of the same sequences, in the parts' order."""
        return _groups(self.ranks, self.batch_ranks, self.tensor)

    def batch_groups(self) -> list[list[int]]:
        """Return the groups of ranks over which the tokens of one micro batch are spread."""
        return _groups(self.ranks, self.batch_ranks)

    def expert_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold different experts, in the same slice."""
        return _groups(self.ranks, self.expert_ranks, self.expert_tensor)

    def inside_node_groups(self) -> list[list[int]]:
        """Return the parts of the expert groups on each of their nodes."""
        size = self.expert // self.nodes
        starts = range(0, self.expert, size)
        return [ranks[first : first + size] for ranks in self.expert_groups() for first in starts]

    def between_nodes_groups(self) -> list[list[int]]:
        """Return the ranks of expert groups with the same number within their nodes, a rank of each node."""
        size = self.expert // self.nodes
        return [ranks[number::size] for ranks in self.expert_groups() for number in range(size)]

    def expert_tensor_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold the slices of the same experts."""
        return _groups(self.ranks, self.expert_tensor)

    def expert_holder_groups(self) -> list[list[int]]:
        """Return the groups of ranks that together hold all experts of a stage once."""
        return _groups(self.ranks, self.expert_ranks)

    def expert_copy_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold the same slice of the same experts."""
        return _groups(self.ranks, self.stage_ranks, self.expert_ranks)


def _groups(ranks: int, size: int, stride: int = 1) -> list[list[int]]:
    """Divide the ranks into runs of a size, and each run into the groups of every `stride`-th rank."""
    starts = [first + place for first in range(0, ranks, size) for place in range(stride)]
    return [list(range(start, start // size * size + size, stride)) for start in starts]
