"""Dispatch: rows to their experts and back, for any number of experts a token.

`LocalDispatch` serves a rank that holds every expert whole: one stable sort of the pairs by expert.
`AllToAllDispatch` adds the exchange with other ranks. Over the expert-parallel group, in which rank r holds
the experts r*E/R .. (r+1)*E/R - 1: sizes first, rows after, and the same way back. Over the expert-tensor
group, whose X ranks hold slices of the same experts: every rank's rows to all, and back the sum of what the
slices made of them. A rank or an expert with no rows is an ordinary case of both. If every pair's expert is
on its token's own rank, the first exchange is left out, sizes too. Rows travel in the model's dtype; the
weighted sum is fp32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.compat.torch_compat import assert_on_device
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.experts.rows import Order, RowTokens, combine, gather, group_pairs, permute
from megamoe.moe.process_groups import gather_rows, rank_in, size_of
from megamoe.moe.routing import Routing


@dataclass
class DispatchState:
    """How the rows of one micro batch were moved, to bring them back.

    rows, weight_N: the tokens and weights of the pairs, sorted by expert. The rest is the exchange's, None
    where there is none: rows sent to and received from each expert-parallel rank, rows of each expert-tensor
    rank, and the order that groups the rows at their end by expert.
    """

    rows: RowTokens
    weight_N: Tensor
    sent_R: list[int] | None = None
    received_R: list[int] | None = None
    gathered_X: list[int] | None = None
    by_expert_M: Order | None = None


def read_counts(counts: Sequence[Tensor]) -> list[list[int]]:
    """Copy int64 vectors to the host in one copy, for which it waits."""
    return [part.tolist() for part in torch.cat([*counts]).cpu().split([*map(len, counts)])]


class LocalDispatch:
    """All experts are here."""

    def __init__(self, kernels: Kernels = DEFAULT_KERNELS) -> None:
        self.kernels = kernels

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, DispatchState]:
        """-> rows_NH grouped by expert, their counts_E int64, and the state for `combine`."""
        state = _sort_by_expert(routing, self.kernels)
        return gather(hidden_TH, state.rows, self.kernels), routing.counts_E(), state

    def send_along(self, values_N: Tensor, state: DispatchState) -> Tensor:
        """Values of the pairs, in the state's order -> of the rows that `dispatch` gave, in theirs."""
        return values_N

    def combine(self, rows_NH: Tensor, state: DispatchState) -> Tensor:
        """Each token's weighted sum of its experts' outputs, [T, H]; zero where it has none."""
        return combine(rows_NH, state.weight_N, state.rows, self.kernels)


class AllToAllDispatch(LocalDispatch):
    """The experts are spread over the ranks of `expert`, or cut into slices over those of `expert_tensor`.

    read_counts: reads the numbers of rows that are sent to each rank of `expert`, received from each, and
    held by each rank of `expert_tensor`. A simulation, whose tensors have no values, gives its own.
    """

    def __init__(
        self,
        expert: dist.ProcessGroup | None,
        expert_tensor: dist.ProcessGroup | None = None,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> None:
        super().__init__(kernels)
        self.expert = expert
        self.expert_tensor = expert_tensor
        self.num_ranks = size_of(expert)
        self.rank = rank_in(expert)
        self.num_slices = size_of(expert_tensor)
        self.slice = rank_in(expert_tensor)
        self.read_counts: Callable[[Sequence[Tensor]], list[list[int]]] = read_counts

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, DispatchState]:
        """-> rows_MH of all ranks for this rank's experts, grouped by expert, their counts, the state.

        Raises:
            RuntimeError: if the routing stays home, but a pair's expert is on another rank; on a GPU it is
                raised there, where nobody waits for it.
        """
        state = _sort_by_expert(routing, self.kernels)
        counts_XSL = self._exchange_counts(routing, state)
        rows_NH = self._send_to_experts(gather(hidden_TH, state.rows, self.kernels), state)
        if state.sent_R is not None or state.gathered_X is not None:
            local_XSL = torch.arange(counts_XSL.shape[-1], device=hidden_TH.device).expand_as(counts_XSL)
            expert_M = torch.repeat_interleave(
                local_XSL.reshape(-1), counts_XSL.reshape(-1), output_size=len(rows_NH)
            )
            state.by_expert_M = Order.by_key(expert_M, counts_XSL.shape[-1], self.kernels)
            rows_NH = permute(rows_NH, state.by_expert_M)
        return rows_NH, counts_XSL.sum((0, 1)), state

    def _exchange_counts(self, routing: Routing, state: DispatchState) -> Tensor:
        """int64 [X, S, L]: rows for each of this rank's L experts by slice rank and the rank they come from;
        what each exchange of rows needs to know goes into the state."""
        sent_RL = routing.counts_E().view(self.num_ranks, -1)
        exchanges = self.expert is not None and not routing.is_local
        if exchanges:
            counts_SL = torch.empty_like(sent_RL)
            dist.all_to_all_single(counts_SL, sent_RL.contiguous(), group=self.expert)
        else:
            counts_SL = sent_RL[self.rank : self.rank + 1]
        if self.expert is not None and routing.is_local:
            all_here = counts_SL.sum() == state.weight_N.numel()
            assert_on_device(all_here, "is_local, but a pair's expert is on another rank")
        counts_XSL = counts_SL[None]
        if self.expert_tensor is not None:
            counts_XSL = gather_rows(counts_SL, self.expert_tensor).view(self.num_slices, *counts_SL.shape)
        # The host needs them, and waits for the device once.
        sums = [sent_RL.sum(1), counts_SL.sum(1), counts_XSL.sum((1, 2))]
        if exchanges or self.expert_tensor is not None:
            sent, received, gathered = self.read_counts(sums)
            state.sent_R, state.received_R = (sent, received) if exchanges else (None, None)
            state.gathered_X = gathered if self.expert_tensor is not None else None
        return counts_XSL

    def _send_to_experts(self, rows: Tensor, state: DispatchState) -> Tensor:
        if state.sent_R is not None:
            rows = _Exchange.apply(rows, state.sent_R, state.received_R, self.expert)
        if state.gathered_X is not None:
            own_X = [len(rows)] * self.num_slices
            rows = _Exchange.apply(
                rows.repeat(self.num_slices, 1), own_X, state.gathered_X, self.expert_tensor
            )
        return rows

    def send_along(self, values_N: Tensor, state: DispatchState) -> Tensor:
        """Values of the pairs, in the state's order -> of the rows that `dispatch` gave, in theirs: [M].

        Without gradient; the same exchanges once more.
        """
        if state.by_expert_M is None:
            return values_N
        return self._send_to_experts(values_N[:, None], state)[:, 0].index_select(
            0, state.by_expert_M.order_N
        )

    def combine(self, rows_NH: Tensor, state: DispatchState) -> Tensor:
        """Return expert outputs to their source ranks, then combine them: [T, H]."""
        if state.by_expert_M is not None:
            rows_NH = permute(rows_NH, state.by_expert_M.back())
        if state.gathered_X is not None:
            own_X = [state.gathered_X[self.slice]] * self.num_slices
            rows_NH = _Exchange.apply(rows_NH, state.gathered_X, own_X, self.expert_tensor)
            rows_NH = rows_NH.view(self.num_slices, own_X[0], rows_NH.shape[1]).sum(0)
        if state.sent_R is not None:
            rows_NH = _Exchange.apply(rows_NH, state.received_R, state.sent_R, self.expert)
        return super().combine(rows_NH, state)


def _sort_by_expert(routing: Routing, kernels: Kernels) -> DispatchState:
    pairs, sizes = routing.pairs, (routing.num_tokens, routing.num_experts)
    grouped = group_pairs(pairs.token_N, pairs.expert_N, pairs.weight_N, sizes, kernels)
    if grouped.counts_E is not None:
        routing.remember_counts(grouped.counts_E)
    return DispatchState(grouped.rows, grouped.weight_N)


class _Exchange(torch.autograd.Function):
    """all_to_all_single with uneven splits; its gradient is the exchange back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    output = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output
