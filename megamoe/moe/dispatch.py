"""Dispatch: rows to their experts and back, for any number of experts a token.

`LocalDispatch` serves a rank that holds every expert: one stable sort of the pairs by expert.
`AllToAllDispatch` adds the exchange over an expert-parallel group, in which rank r holds the experts
r*E/R .. (r+1)*E/R - 1: sizes first, rows after, and the same way back. A rank or an expert with no
rows is an ordinary case of both. A routing that stays home exchanges nothing, sizes neither. Rows travel
in the model's dtype; the weighted sum is fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.routing import Routing


@dataclass
class Plan:
    """How the rows of one micro batch were moved, to bring them back.

    token_N, weight_N: of the pairs, sorted by expert. The rest is the exchange's, None where there is none:
    rows sent to and received from each rank, and the order that groups the received rows by expert.
    """

    token_N: Tensor
    weight_N: Tensor
    num_tokens: int
    sent_R: list[int] | None = None
    received_R: list[int] | None = None
    by_expert_M: Tensor | None = None


class LocalDispatch:
    """All experts are here."""

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Plan]:
        """-> rows_NH grouped by expert, their counts_E int64, and the plan for `combine`."""
        plan = _sort_by_expert(routing)
        return hidden_TH.index_select(0, plan.token_N), routing.counts_E(), plan

    def send_along(self, values_N: Tensor, plan: Plan) -> Tensor:
        """Values of the pairs, in the plan's order -> of the rows that `dispatch` gave, in theirs."""
        return values_N

    def combine(self, rows_NH: Tensor, plan: Plan) -> Tensor:
        """Each token's weighted sum of its experts' outputs, [T, H]; zero where it has none."""
        return _weighted_sum(rows_NH, plan)


class AllToAllDispatch:
    """The experts are spread over the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Plan]:
        """-> rows_MH of all ranks for this rank's experts, grouped by expert, their counts, the plan.

        Raises:
            RuntimeError: if the routing stays home, but a pair's expert is on another rank; on a GPU it is
                raised there, where nobody waits for it.
        """
        plan = _sort_by_expert(routing)
        sent_counts_E = routing.counts_E()
        if routing.stays_home:
            home_L = sent_counts_E.view(self.num_ranks, -1)[self.rank]
            all_here = home_L.sum() == plan.token_N.numel()
            torch._assert_async(all_here, "stays_home, but a pair's expert is on another rank")
            return hidden_TH.index_select(0, plan.token_N), home_L, plan
        received_counts_E = torch.empty_like(sent_counts_E)
        dist.all_to_all_single(received_counts_E, sent_counts_E, group=self.group)
        received_RL = received_counts_E.view(self.num_ranks, -1)  # L: experts of this rank
        plan.sent_R = sent_counts_E.view(self.num_ranks, -1).sum(1).tolist()
        plan.received_R = received_RL.sum(1).tolist()
        rows_NH = hidden_TH.index_select(0, plan.token_N)
        rows_MH = _Exchange.apply(rows_NH, plan.sent_R, plan.received_R, self.group)
        local_RL = torch.arange(received_RL.shape[1], device=hidden_TH.device).expand_as(received_RL)
        expert_M = torch.repeat_interleave(local_RL.reshape(-1), received_RL.reshape(-1))
        plan.by_expert_M = torch.argsort(expert_M, stable=True)
        return rows_MH.index_select(0, plan.by_expert_M), received_RL.sum(0), plan

    def send_along(self, values_N: Tensor, plan: Plan) -> Tensor:
        """Values of the pairs, in the plan's order -> of the rows that `dispatch` gave, in theirs: [M].

        Without gradient; an exchange more.
        """
        if plan.sent_R is None or plan.received_R is None or plan.by_expert_M is None:
            return values_N
        values_M1 = _exchange(values_N[:, None], plan.sent_R, plan.received_R, self.group)
        return values_M1[:, 0].index_select(0, plan.by_expert_M)

    def combine(self, rows_MH: Tensor, plan: Plan) -> Tensor:
        """The rows go home, then as in `LocalDispatch`: [T, H]."""
        if plan.by_expert_M is None:
            return _weighted_sum(rows_MH, plan)
        home_M = torch.empty_like(plan.by_expert_M)
        home_M[plan.by_expert_M] = torch.arange(home_M.numel(), device=home_M.device)
        rows_NH = _Exchange.apply(rows_MH.index_select(0, home_M), plan.received_R, plan.sent_R, self.group)
        return _weighted_sum(rows_NH, plan)


def _sort_by_expert(routing: Routing) -> Plan:
    order_N = torch.argsort(routing.pairs.expert_N, stable=True)
    return Plan(routing.pairs.token_N[order_N], routing.pairs.weight_N[order_N], routing.num_tokens)


def _weighted_sum(rows_NH: Tensor, plan: Plan) -> Tensor:
    weighted_NH = rows_NH.float() * plan.weight_N[:, None]
    output_TH = weighted_NH.new_zeros(plan.num_tokens, rows_NH.shape[1])
    return output_TH.index_add(0, plan.token_N, weighted_NH).to(rows_NH.dtype)


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
