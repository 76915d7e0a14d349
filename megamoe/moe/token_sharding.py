"""Micro batches whose tokens are spread over tensor-parallel ranks: gathered scores, each rank's share."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.kernels.autograd import Function
from megamoe.moe.part import StepContext
from megamoe.moe.process_groups import gather_rows, rank_in, size_of
from megamoe.moe.routing import Routing


class TokenSharding:
    """The tokens of a micro batch in contiguous shares on the ranks of a group, in order of rank.

    The shares are equal but for padding, which a layer removes from each (`MicroBatch.bounds`).

    A score depends on its own token only, so each rank scores its own tokens. Later stages may need the whole
    micro batch (capacity, expert choice, balance losses). So the ranks gather the scores, [T, E] and not [T,
    H], and each of them routes all tokens, with the same result. In backward every rank contributes the
    gradient of its own tokens' experts and its share of the auxiliary losses. The gradient of a parameter of
    the layer on one rank is therefore partial and must be summed over the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = size_of(group)
        self.rank = rank_in(group)

    def local_context(self, context: StepContext, num_tokens: int) -> StepContext:
        """Return the context of this rank's `num_tokens` tokens."""
        if self.size == 1:
            return context
        own, whole, batch = (
            self.local_slice(context, num_tokens * self.size),
            num_tokens * self.size,
            context.batch,
        )
        if batch.token_index_T is None:
            batch = replace(batch, token_index_T=torch.arange(whole))
        if batch.position_T is None:
            batch = replace(batch, position_T=context.position(whole, torch.device("cpu")))
        return context.with_batch(batch.tokens(own))

    def local_slice(self, context: StepContext | None, num_tokens: int) -> slice:
        """Return the rows of this rank's tokens among the `num_tokens` of the micro batch."""
        if context is not None and context.batch.bounds is not None:
            return slice(*context.batch.bounds[self.rank : self.rank + 2])
        share = num_tokens // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def all_gather(self, rows: Tensor, context: StepContext | None = None) -> Tensor:
        """Gather a tensor with a row for each of this rank's tokens into one for the whole micro batch.

        context: needed where there is padding, and the shares are not equal.
        """
        if self.size == 1:
            return rows
        if context is not None and context.batch.bounds is not None:
            return self._all_gather_unequal(rows, context.batch.bounds)
        return _GatherRows.apply(rows, self.group)

    def _all_gather_unequal(self, rows: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """Gather shares of different sizes, all filled up to the largest."""
        sizes = [last - first for first, last in pairwise(bounds)]
        largest = max(sizes)
        filling = rows.new_zeros(largest - len(rows), *rows.shape[1:])
        gathered: Tensor = _GatherRows.apply(torch.cat((rows, filling)), self.group)
        of_ranks = gathered.unflatten(0, (self.size, largest))  # `split` knows no shares of 0 rows
        return torch.cat([part[:size] for part, size in zip(of_ranks, sizes, strict=True)])

    def without_padding(
        self, compute: Callable[[Tensor, StepContext], Tensor], hidden_TH: Tensor, context: StepContext
    ) -> Tensor:
        """Return compute(hidden_TH, context), [T, H], without padding: it is not computed, and its output is
        0.
        """
        padding = context.batch.padding
        if padding is None:
            return compute(hidden_TH, context)
        place_V = padding.own_places(self.rank, self.size)
        batch = context.batch.without_padding(self.size)
        output_VH = compute(hidden_TH[place_V], context.with_batch(batch))
        return output_VH.new_zeros(hidden_TH.shape).index_copy(0, place_V, output_VH)

    def local_shard(self, routing: Routing, context: StepContext | None = None) -> Routing:
        """Return the routing of this rank's tokens, numbered from 0; context: as in `all_gather`."""
        if self.size == 1:
            return routing
        own = self.local_slice(context, routing.num_tokens)
        return routing.of_tokens(own.start, own.stop - own.start)


class _GatherRows(Function):
    """All-gather of rows in order of rank; in backward, the sum over ranks of the gradient of this rank's
    rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        own = gradient.new_empty(len(gradient) // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient, group=ctx.group)
        return own, None
