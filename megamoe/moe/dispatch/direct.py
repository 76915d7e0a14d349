"""The exchange `direct`: a row for each of a token's experts, straight to the rank of the expert.

Over the expert-parallel group, in which rank r holds the experts r*E/R .. (r+1)*E/R - 1: sizes first, rows
after, and the same way back. Over the expert-tensor group, whose X ranks hold slices of the same experts:
every rank's rows to all, and back the sum of what the slices made of them. A rank or an expert with no rows
is an ordinary case of both. If every pair's expert is on its token's own rank, the first exchange is left
out, sizes too. Rows travel in the model's dtype or in 8 bits; the weighted sum is fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.compat.torch_compat import assert_on_device
from megamoe.kernels.experts.rows import Order, RowTokens, combine, permute, sum_rows
from megamoe.moe.dispatch.dispatcher import (
    DispatchConfig,
    Dispatcher,
    ReadCounts,
    of_tokens,
    read_counts,
    rows_of_slots,
    sort_by_expert,
)
from megamoe.moe.dispatch.transfer import Rows, Transfer
from megamoe.moe.process_groups import gather_rows, rank_in, size_of
from megamoe.moe.routing import Pairs, Routing


@dataclass
class DirectState:
    """How the rows of one micro batch are moved, to bring them back.

    rows, weight_N, order_N: the tokens and weights of the pairs, sorted by expert, and their old numbers.
    counts_XSL: int64, rows for each of this rank's L experts by slice rank and the rank they come from. out,
    back, sliced: the exchanges over the expert-parallel group and to the slices, None where there is none.
    gathered_X: rows of each slice rank. experts_L: rows for each of this rank's experts, where the host has
    read them. arriving: what `out` has started. by_expert_M: the order that groups
    the rows at their end by expert. num_tokens: of the output.
    """

    rows: RowTokens
    weight_N: Tensor
    order_N: Tensor
    counts_XSL: Tensor
    num_tokens: int
    sent_R: list[int] | None = None
    received_R: list[int] | None = None
    gathered_X: list[int] | None = None
    experts_L: list[int] | None = None
    out: Transfer | None = None
    arriving: Rows | None = None
    by_expert_M: Order | None = None


class DirectDispatch(Dispatcher):
    """The experts are spread over the ranks of `expert`, or cut into slices over those of `expert_tensor`.

    read_counts: reads the numbers of rows by name: `sent` to each rank of `expert`, `received` from each, and
    `gathered`, held by each rank of `expert_tensor`; with `settings.host_counts` those of each expert here,
    `experts`. A simulation, whose tensors have no values, gives its own.
    """

    knows_slots = True
    sends_weights = True

    def __init__(self, config: Any, settings: DispatchConfig) -> None:
        super().__init__(config, settings)
        self.expert, self.expert_tensor = settings.groups.expert, settings.groups.expert_tensor
        self.num_ranks, self.rank = size_of(self.expert), rank_in(self.expert)
        self.num_slices, self.slice = size_of(self.expert_tensor), rank_in(self.expert_tensor)
        self.fp8, self.reads_experts = settings.fp8, settings.host_counts
        self.read_counts: ReadCounts = read_counts
        self.interleaves = True  # not inside a node, where the exchange between nodes does

    def start(self, hidden_TH: Tensor, routing: Routing) -> DirectState:
        """See `Dispatcher`.

        Raises:
            RuntimeError: if the routing stays home, but a pair's expert is on another rank; on a GPU it is
                raised there, where nobody waits for it.
        """
        if routing.slots is not None:
            return self._start_slots(hidden_TH, routing, routing.slots)
        sizes = (routing.num_tokens, routing.num_experts)
        found, counts_E = sort_by_expert(routing.pairs, sizes, self.kernels)
        if counts_E is not None:
            routing.remember_counts(counts_E)
        counts_XSL, to_read = self.exchange_counts(routing.counts_E(), routing.is_local)
        if routing.is_local and self.expert is not None:
            all_here = counts_XSL[self.slice].sum() == found[1].numel()
            assert_on_device(all_here, "is_local, but a pair's expert is on another rank")
        numbers = self.read_counts(to_read) if to_read else {}
        state = DirectState(*found, counts_XSL, routing.num_tokens)
        fp8 = self.fp8 and "sent" in numbers  # not for rows that stay here
        self.send(Rows.of(hidden_TH, fp8), state, numbers)
        return state

    def _start_slots(self, hidden_TH: Tensor, routing: Routing, slots: int) -> DirectState:
        """Begin to send rows whose numbers all ranks know: `slots` of each rank for each expert."""
        found, hidden_TH = rows_of_slots(hidden_TH, routing, self.kernels)
        experts = routing.num_experts // self.num_ranks
        sizes = (self.num_slices, self.num_ranks, experts)
        counts_XSL = torch.full(sizes, slots, device=hidden_TH.device)
        numbers: dict[str, list[int]] = {}
        if self.expert is not None:
            numbers = dict.fromkeys(("sent", "received"), [experts * slots] * self.num_ranks)
        if self.expert_tensor is not None:
            numbers["gathered"] = [routing.num_experts * slots] * self.num_slices
        if self.reads_experts:
            numbers["experts"] = [self.num_slices * self.num_ranks * slots] * experts
        state = DirectState(*found, counts_XSL, routing.num_tokens)
        self.send(Rows.of(hidden_TH, self.fp8 and self.expert is not None), state, numbers)
        return state

    def start_pairs(
        self, rows: Rows, pairs: Pairs, num_experts: int, counts_XSL: Tensor, numbers: dict[str, list[int]]
    ) -> DirectState:
        """Begin to send rows whose counts `exchange_counts` has exchanged, and which were read since."""
        found, _ = sort_by_expert(pairs, (len(rows.values), num_experts), self.kernels)
        state = DirectState(*found, counts_XSL, len(rows.values))
        self.send(rows, state, numbers)
        return state

    def exchange_counts(self, counts_E: Tensor, is_local: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return counts_XSL, see `DirectState`, and the numbers by name that the host must read; none where
        nothing is exchanged.
        """
        sent_RL = counts_E.view(self.num_ranks, -1)
        exchanges = self.expert is not None and not is_local
        if exchanges:
            counts_SL = torch.empty_like(sent_RL)
            dist.all_to_all_single(counts_SL, sent_RL.contiguous(), group=self.expert)
        else:
            counts_SL = sent_RL[self.rank : self.rank + 1]
        counts_XSL = counts_SL[None]
        if self.expert_tensor is not None:
            counts_XSL = gather_rows(counts_SL, self.expert_tensor).view(self.num_slices, *counts_SL.shape)
        to_read: dict[str, Tensor] = {}
        if exchanges:
            to_read |= {"sent": sent_RL.sum(1), "received": counts_SL.sum(1)}
        if self.expert_tensor is not None:
            to_read["gathered"] = counts_XSL.sum((1, 2))
        if to_read and self.reads_experts:
            to_read["experts"] = counts_XSL.sum((0, 1))
        return counts_XSL, to_read

    def send(self, rows: Rows, state: DirectState, numbers: dict[str, list[int]]) -> None:
        """Begin to send the rows to the ranks of their experts."""
        state.sent_R, state.received_R = numbers.get("sent"), numbers.get("received")
        state.gathered_X, state.experts_L = numbers.get("gathered"), numbers.get("experts")
        state.arriving = rows.gathered(state.rows, self.kernels)
        if state.sent_R is not None:
            state.out = self._transfer(state.sent_R, state.received_R)
            state.arriving = state.out.start(state.arriving)

    def finish(self, state: DirectState) -> tuple[Tensor, Tensor]:
        """See `Dispatcher`."""
        rows, state.arriving = state.arriving, None
        assert rows is not None
        if state.out is not None:
            rows = state.out.finish(rows)
        rows_MH = self._to_slices(rows.decoded(), state)
        if state.sent_R is not None or state.gathered_X is not None:
            counts_XSL = state.counts_XSL
            local_XSL = torch.arange(counts_XSL.shape[-1], device=rows_MH.device).expand_as(counts_XSL)
            expert_M = torch.repeat_interleave(
                local_XSL.reshape(-1), counts_XSL.reshape(-1), output_size=len(rows_MH)
            )
            state.by_expert_M = Order.by_key(expert_M, counts_XSL.shape[-1], self.kernels)
            rows_MH = permute(rows_MH, state.by_expert_M)
        return rows_MH, state.counts_XSL.sum((0, 1))

    def host_counts(self, state: DirectState) -> Tensor | None:
        """See `Dispatcher`."""
        return None if state.experts_L is None else torch.tensor(state.experts_L)

    def _to_slices(self, rows: Tensor, state: DirectState) -> Tensor:
        if state.gathered_X is None:
            return rows
        assert self.expert_tensor is not None
        own_X = [len(rows)] * self.num_slices
        to_all = Transfer(own_X, state.gathered_X, self.expert_tensor)
        return to_all.run(rows.repeat(self.num_slices, 1))

    def _transfer(self, sent: list[int] | None, received: list[int] | None) -> Transfer:
        assert self.expert is not None and sent is not None and received is not None
        return Transfer(sent, received, self.expert, self.interleaves)

    def dispatch_values(self, values_N: Tensor, state: DirectState) -> Tensor:
        """See `Dispatcher`."""
        return self._send_again(values_N.index_select(0, state.order_N), state)

    def combine(self, rows_MH: Tensor, state: DirectState) -> Tensor:
        """See `Dispatcher`."""
        rows_NH = self._send_back(rows_MH, state)
        return of_tokens(combine(rows_NH, state.weight_N, state.rows, self.kernels), state.num_tokens)

    def dispatched_weights(self, state: DirectState) -> Tensor:
        """See `Dispatcher`."""
        return self._send_again(state.weight_N, state)

    def _send_again(self, values_N: Tensor, state: DirectState) -> Tensor:
        """Return values of the rows here by the same exchanges once more, in the order of `finish`."""
        if state.by_expert_M is None:
            return values_N
        values = values_N[:, None]
        if state.sent_R is not None:
            assert self.expert is not None and state.received_R is not None
            values = Transfer(state.sent_R, state.received_R, self.expert).run(values)
        return permute(self._to_slices(values, state)[:, 0], state.by_expert_M)

    def combine_weighted(self, rows_MH: Tensor, state: DirectState) -> Tensor:
        """See `Dispatcher`."""
        rows_NH = self._send_back(rows_MH, state)
        return of_tokens(sum_rows(rows_NH, state.rows, self.kernels), state.num_tokens)

    def _send_back(self, rows_MH: Tensor, state: DirectState) -> Tensor:
        """Return the experts' outputs to the ranks of their tokens, in the order of `state.rows`."""
        if state.by_expert_M is not None:
            rows_MH = permute(rows_MH, state.by_expert_M.back())
        if state.gathered_X is not None:
            assert self.expert_tensor is not None
            own_X = [state.gathered_X[self.slice]] * self.num_slices
            rows_MH = Transfer(state.gathered_X, own_X, self.expert_tensor).run(rows_MH)
            rows_MH = rows_MH.view(self.num_slices, own_X[0], rows_MH.shape[1]).sum(0)
        if state.sent_R is not None:
            rows_MH = self._transfer(state.received_R, state.sent_R).run(rows_MH)
        return rows_MH
