"""The process groups of one MoE layer."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of one layer; None: this rank alone.

    tensor: ranks over which the tokens of one micro batch are spread (tensor parallelism). expert: ranks that
    hold different experts. expert_tensor: ranks that hold slices of the same experts. The expert groups do
    not depend on the tensor group: every rank has its own tokens. between_nodes: the ranks of `expert` with
    this rank's number within their node, a rank of each node; None: rows do not travel by node. inside_node:
    the ranks of `expert` on this node.
    """

    tensor: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_tensor: dist.ProcessGroup | None = None
    between_nodes: dist.ProcessGroup | None = None
    inside_node: dist.ProcessGroup | None = None

    @property
    def follows_data(self) -> bool:
        """Whether data-parallel rank n has its tokens on expert-parallel rank n modulo the number of those
        ranks.
        """
        return size_of(self.tensor) == size_of(self.expert_tensor)


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this rank's number in the group; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def gather_unequal_rows(rows: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the rows of each rank in order of rank, without gradient; their numbers may differ."""
    sizes = gather_rows(torch.full((1,), len(rows), device=rows.device), group).tolist()
    filled = torch.cat((rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])))
    gathered = gather_rows(filled, group).unflatten(0, (len(sizes), max(sizes)))
    return [rank[:size] for rank, size in zip(gathered, sizes, strict=True)]


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks in order of rank, without gradient; every rank has the same number."""
    gathered = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered
