"""Biases of experts on rows grouped by expert."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def experts_of_rows(counts_E: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each of `num_rows` rows grouped by expert, int64; counts_E: int64."""
    expert_E = torch.arange(len(counts_E), device=counts_E.device)
    return torch.repeat_interleave(expert_E, counts_E, output_size=num_rows)


def add_expert_bias(rows_NG: Tensor, bias_EG: Tensor, expert_N: Tensor) -> Tensor:
    """Return the rows with their expert's bias added, [N, G]; expert_N: int64."""
    output_NG: Tensor = _ExpertBias.apply(rows_NG, bias_EG, expert_N)
    return output_NG


class _ExpertBias(torch.autograd.Function):
    """PyTorch's own backward of a row lookup adds atomically on CUDA, in an order that varies.

    Here the biases' gradient is a product, [E, N] of zeros and ones times [N, G].
    """

    @staticmethod
    def forward(ctx: Any, rows_NG: Tensor, bias_EG: Tensor, expert_N: Tensor) -> Tensor:
        ctx.save_for_backward(expert_N)
        ctx.num_experts = len(bias_EG)
        return bias_EG.index_select(0, expert_N).to(rows_NG.dtype).add_(rows_NG)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NG: Tensor) -> tuple[Tensor, Tensor, None]:
        (expert_N,) = ctx.saved_tensors
        expert_E1 = torch.arange(ctx.num_experts, device=expert_N.device)[:, None]
        is_of_EN = (expert_N == expert_E1).to(gradient_NG.dtype)
        return gradient_NG, is_of_EN @ gradient_NG, None
