"""The ranks that share one MoE layer, and the tokens of a micro batch spread over some of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of one layer; None: this rank alone.

    tensor: ranks over which the tokens of one micro batch are spread, as tensor parallelism leaves them.
    expert: ranks that hold different experts. expert_tensor: ranks that hold slices of the same experts.
    The last two are chosen without regard to the first: every rank has tokens of its own, and experts stand
    wherever they stand.
    """

    tensor: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_tensor: dist.ProcessGroup | None = None

    @property
    def follows_data(self) -> bool:
        """Whether all tokens of data-parallel rank n are on expert-parallel rank n modulo their number."""
        return size_of(self.tensor) == size_of(self.expert_tensor)


def size_of(group: dist.ProcessGroup | None) -> int:
    """Its ranks; 1 of None."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's number in it; 0 of None."""
    return 0 if group is None else dist.get_rank(group)


class TokenSpread:
    """The tokens of a micro batch in equal runs on the ranks of a group, in order of rank.

    Scoring is each token's own affair and done where the token is. What comes after it may look at the whole
    micro batch (capacity, expert choice, balance losses), so the scores are gathered, [T, E] numbers and not
    [T, H], and every rank of the group decides for all tokens, alike. The gradient of that decision is
    spread over the ranks again: each adds what its own tokens' experts say, and its share of the auxiliary
    losses. What a parameter of the layer gets on one rank is therefore a part, to be summed over the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = size_of(group)
        self.rank = rank_in(group)

    def own_context(self, context: StepContext, num_tokens: int) -> StepContext:
        """Of the micro batch's context -> that of this rank's `num_tokens` tokens."""
        if self.size == 1:
            return context
        own = slice(self.rank * num_tokens, (self.rank + 1) * num_tokens)
        index_T, ids_T = context.token_index_T, context.token_ids_T
        if index_T is None:
            index_T = torch.arange(num_tokens * self.size)
        return replace(context, token_index_T=index_T[own], token_ids_T=None if ids_T is None else ids_T[own])

    def whole(self, rows: Tensor) -> Tensor:
        """A row for each of this rank's tokens -> for each token of the micro batch."""
        if self.size == 1:
            return rows
        gathered: Tensor = _GatherRows.apply(rows, self.group)
        return gathered

    def own(self, routing: Routing) -> Routing:
        """What concerns this rank's tokens, numbered from 0."""
        if self.size == 1:
            return routing
        num_tokens = routing.num_tokens // self.size
        return routing.of_tokens(self.rank * num_tokens, num_tokens)


class _GatherRows(torch.autograd.Function):
    """All ranks' rows in order of rank; backward, the sum of what all ranks say of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        own = gradient.new_empty(len(gradient) // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient, group=ctx.group)
        return own, None
