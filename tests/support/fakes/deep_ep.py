"""DeepEP's `Buffer` on torch.distributed: the parameters and results of its published signatures.

As read in deep_ep/buffer.py of github.com/deepseek-ai/DeepEP. What it does is ours, in plain PyTorch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EventOverlap:
    """Nothing to wait for."""


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass
class Handle:
    """token_S: the tokens of the rows that leave, sorted by rank. sent, received: rows of each rank."""

    token_S: Tensor
    num_tokens: int
    sent: list[int]
    received: list[int]


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.ranks = group, group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64
        expert_N = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(expert_N, minlength=num_experts).int()
        rank_TK = topk_idx.div(num_experts // self.ranks, rounding_mode="floor")
        is_in_rank = torch.stack([(rank_TK == rank).any(dim=1) for rank in range(self.ranks)], dim=1)
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            rows = self._sent(x[handle.token_S], handle.sent, handle.received)
            return rows, None, None, None, None, EventOverlap()
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        assert is_token_in_rank is not None and topk_idx is not None and topk_weights is not None
        assert topk_weights.dtype == torch.float32
        rank_S, token_S = is_token_in_rank.T.nonzero(as_tuple=True)
        sent = num_tokens_per_rank.long()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        made = Handle(token_S, len(x), sent.tolist(), received.tolist())
        experts = len(num_tokens_per_expert) // self.ranks
        local = topk_idx[token_S] - rank_S[:, None] * experts
        is_there = (topk_idx[token_S] >= 0) & (local >= 0) & (local < experts)
        columns = (x[token_S], local.where(is_there, -1), topk_weights[token_S].where(is_there, 0.0))
        rows, local, weights = (self._sent(column, made.sent, made.received) for column in columns)
        counts = [int((local == expert).sum()) for expert in range(experts)]
        return rows, local, weights, counts, made, EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        weights = None if topk_weights is None else self._summed(topk_weights, handle)
        return self._summed(x, handle), weights, EventOverlap()

    def _summed(self, rows: Tensor, handle: Handle) -> Tensor:
        back = self._sent(rows, handle.received, handle.sent)
        total = torch.zeros(handle.num_tokens, back.shape[1]).index_add(0, handle.token_S, back.float())
        return total.to(rows.dtype)

    def _sent(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self.group)
        return arrived
