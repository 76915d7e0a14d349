"""A plugin that lets DeepEP (github.com/deepseek-ai/DeepEP) send the rows of the experts.

It is written against the published signatures of `deep_ep.Buffer` and tested with a stand-in of them on CPU
ranks. IT NEVER RAN ON A GPU, nor with DeepEP itself. With DeepEP installed:

    plugins: [examples/deepep_exchange.py]
    parallel:
      expert: 64
      exchange: {name: deepep, most_choices: 8}

DeepEP takes rows in bf16, sends a row to each rank once, and adds up what returns; the weighted sum over the
experts of a rank is ours. Its buffers exist once for each group of ranks.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.errors import UserError
from megamoe.kernels.experts.rows import RowTokens, combine, gather
from megamoe.moe.dispatch.dispatcher import DispatchConfig, Dispatcher, sort_by_expert
from megamoe.moe.process_groups import rank_in, size_of
from megamoe.moe.routing import Pairs, Routing
from megamoe.registry import register


@dataclass
class Received:
    """What this rank got in one pass. handle: DeepEP's, of the way back. rows_RH: a row for each token that
    has experts here. tokens, weight_M: of the rows for the experts, sorted by expert. counts_E: int64.
    """

    handle: Any
    rows_RH: Tensor
    tokens: RowTokens
    weight_M: Tensor
    counts_E: Tensor


@register("exchange", "deepep")
class DeepEP(Dispatcher):
    """DeepEP's kernels for training, between nodes and inside them.

    Source: DeepSeek-AI, DeepEP: `Buffer.get_dispatch_layout`, `dispatch`, `combine`.
    """

    @dataclass
    class Config:
        """most_choices: the most experts of a token."""

        most_choices: int = 8

    def __init__(self, config: Config, places: DispatchConfig) -> None:
        super().__init__(config, places)
        if places.fp8:
            raise UserError("parallel.exchange_dtype: deepep sends bf16 here; legal: model")
        if places.groups.expert_tensor is not None or places.groups.expert is None:
            raise UserError("parallel.expert_tensor: deepep knows no slices of experts; legal: 1")
        self.group, self.num_experts = places.groups.expert, places.num_experts
        self.own = self.num_experts // size_of(self.group)
        self.first = rank_in(self.group) * self.own
        self.most_choices = config.most_choices

    def start(self, hidden_TH: Tensor, routing: Routing) -> Received:
        """See `Dispatcher`. The host waits inside for the number of rows that arrive."""
        if hidden_TH.dtype != torch.bfloat16:
            raise UserError(f"parallel.precision: deepep sends bf16, found {hidden_TH.dtype}; legal: bf16")
        pairs, sizes = routing.pairs, (routing.num_tokens, self.most_choices)
        slot_N = (pairs.token_N, pairs.choice_N)
        expert_TK = pairs.expert_N.new_full(sizes, -1).index_put(slot_N, pairs.expert_N)
        weight_TK = pairs.weight_N.new_zeros(sizes).index_put(slot_N, pairs.weight_N)
        buffer = buffer_of(self.group, hidden_TH.shape[1] * hidden_TH.element_size())
        rows_RH, weight_RK, expert_RK, handle = _Dispatch.apply(
            hidden_TH, weight_TK, expert_TK, self.num_experts, buffer
        )
        row_N, choice_N = (expert_RK >= 0).nonzero(as_tuple=True)
        here = Pairs(row_N, expert_RK[row_N, choice_N], weight_RK[row_N, choice_N], choice_N)
        (tokens, weight_M, _), counts_E = sort_by_expert(here, (len(rows_RH), self.own), self.kernels)
        if counts_E is None:
            counts_E = torch.bincount(here.expert_N, minlength=self.own)
        return Received(handle, rows_RH, tokens, weight_M, counts_E)

    def finish(self, state: Received) -> tuple[Tensor, Tensor]:
        """See `Dispatcher`."""
        return gather(state.rows_RH, state.tokens, self.kernels), state.counts_E

    def dispatch_values(self, values_N: Tensor, state: Received) -> Tensor:
        """Refuse: DeepEP sends no integers."""
        raise UserError("moe.expert_output_dropout, expert_activation_dropout: not with the exchange deepep")

    def combine(self, rows_MH: Tensor, state: Received) -> Tensor:
        """See `Dispatcher`. The sum of each rank is rounded to bf16 before it returns."""
        rows_RH = combine(rows_MH, state.weight_M, state.tokens, self.kernels)
        buffer = buffer_of(self.group, rows_RH.shape[1] * rows_RH.element_size())
        output_TH: Tensor = _Combine.apply(rows_RH, state.handle, buffer)
        return output_TH


@cache
def buffer_of(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """Return the buffer of a group for rows of so many bytes, made at the first call."""
    from deep_ep import Buffer

    ranks, nvl_bytes, rdma_bytes = group.size(), 0, 0
    for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
        nvl_bytes = max(nvl_bytes, config.get_nvl_buffer_size_hint(row_bytes, ranks))
        rdma_bytes = max(rdma_bytes, config.get_rdma_buffer_size_hint(row_bytes, ranks))
    return Buffer(group, nvl_bytes, rdma_bytes)


class _Dispatch(torch.autograd.Function):
    """Rows and weights to the ranks of the experts; the gradients take `combine` back."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, num_experts: int, buffer: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            expert_TK, num_experts
        )
        rows_RH, expert_RK, weight_RK, _, handle, _ = buffer.dispatch(
            hidden_TH.contiguous(),
            topk_idx=expert_TK,
            topk_weights=weight_TK.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(expert_RK)
        return rows_RH, weight_RK, expert_RK, handle

    @staticmethod
    def backward(ctx: Any, rows_RH: Tensor, weight_RK: Tensor, *unused: Any) -> tuple[Any, ...]:
        hidden_TH, weight_TK, _ = ctx.buffer.combine(
            rows_RH.contiguous(), ctx.handle, topk_weights=weight_RK.float().contiguous()
        )
        return hidden_TH, weight_TK, None, None, None


class _Combine(torch.autograd.Function):
    """The sum of the ranks' rows to each token; the gradient takes `dispatch` there."""

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, handle: Any, buffer: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        output_TH, _, _ = buffer.combine(rows_RH.contiguous(), handle)
        return output_TH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows_RH, *_ = ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle)
        return rows_RH, None, None
