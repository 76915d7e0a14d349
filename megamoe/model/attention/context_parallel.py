"""Context parallelism: each rank has a part of every sequence, and attention exchanges heads for positions.

The parts are contiguous. Around the core attention two all-to-alls (DeepSpeed-Ulysses, Jacobs et al. 2023,
2309.14509, section 3) give each rank all positions of some heads, so every kind of attention runs unchanged:
windows, sinks, soft caps, documents, latent attention, grouped queries.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.kernels.autograd import Function


@dataclass(frozen=True)
class ContextShard:
    """This rank's part of the sequences, and the ranks that have the others, in the order of the parts."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "ContextShard":
        """Return this rank's part in a group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def __deepcopy__(self, memo: Any) -> "ContextShard":
        """Return the same object: Megatron-Core copies configurations, and a process group has no copy."""
        return self

    def own(self, values: Tensor, dim: int) -> Tensor:
        """Return this rank's part of whole sequences, a view; dim: of the positions."""
        length = values.shape[dim] // self.size
        return values.narrow(dim, self.rank * length, length)

    def own_heads(self, values_N: Tensor) -> Tensor:
        """Return what belongs to the heads that this rank computes, of one value for each head."""
        return values_N.chunk(self.size)[self.rank]

    def to_heads(self, sides_SBND: Tensor) -> Tensor:
        """Exchange [S / size, B, N, D] for [S, B, N / size, D]: all positions of this rank's heads."""
        return _Exchange.apply(sides_SBND, self, True)

    def to_positions(self, sides_SBND: Tensor) -> Tensor:
        """Exchange [S, B, N / size, D] for [S / size, B, N, D]: all heads at this rank's positions."""
        return _Exchange.apply(sides_SBND, self, False)

    def groups_to_heads(self, heads_SBGD: Tensor, num_heads: int) -> Tensor:
        """Exchange keys or values of G groups of queries, which are repeated where a rank would have none.

        num_heads: of the queries before the exchange.
        """
        groups = heads_SBGD.shape[2]
        if groups % self.size:
            heads = self.size if self.size % groups == 0 else num_heads
            heads_SBGD = heads_SBGD.repeat_interleave(heads // groups, dim=2)
        return self.to_heads(heads_SBGD)

    def gather(self, heads_SB1D: Tensor) -> Tensor:
        """Return all positions of what all heads share, [S / size, B, 1, D] -> [S, B, 1, D].

        In backward the gradients of all ranks' heads are summed.
        """
        return self.to_heads(heads_SB1D.expand(-1, -1, self.size, -1))


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, heads_SBND: Tensor, shard: ContextShard, to_heads: bool) -> Tensor:
        ctx.shard, ctx.to_heads = shard, to_heads
        size = shard.size
        positions, batch, heads, width = heads_SBND.shape
        if to_heads:
            sent = heads_SBND.reshape(positions, batch, size, heads // size, width)
            sent = sent.permute(2, 0, 1, 3, 4).contiguous()
        else:
            sent = heads_SBND.contiguous().view(size, positions // size, batch, heads, width)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=shard.group)
        if to_heads:
            return received.view(size * positions, batch, heads // size, width)
        return received.permute(1, 2, 0, 3, 4).reshape(positions // size, batch, size * heads, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient: Tensor = _Exchange.apply(gradients[0], ctx.shard, not ctx.to_heads)
        return gradient, None, None
