"""Megatron-Core's linear layers, with a short way where no rank has but a part of the weight."""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megamoe.kernels.autograd import Function, once_differentiable


class ColumnLinear(ColumnParallelLinear):
    """Megatron-Core's, whose output columns are divided over the tensor-parallel ranks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_whole = is_whole(self) and not self.disable_grad_reduce

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> ([..., out], the bias if it is to be added later)."""
        used: Tensor = self.weight if weight is None else weight
        if self.is_whole and learns(used):
            return whole_product(input_, used), self.bias
        return super().forward(input_, weight, runtime_gather_output)


class RowLinear(RowParallelLinear):
    """Megatron-Core's, whose input columns are divided over the tensor-parallel ranks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_whole = is_whole(self)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> ([..., out], the bias if it is to be added later)."""
        weight: Tensor = self.weight
        if self.is_whole and learns(weight):
            return whole_product(input_, weight), self.bias
        return super().forward(input_)


def is_whole(linear: Any) -> bool:
    """Return whether the layer only multiplies by its whole weight, and adds no bias."""
    return (
        linear.tp_group.size() == 1
        and (linear.bias is None or linear.skip_bias_add)
        and not linear.explicit_expert_comm
        and not linear.gradient_accumulation_fusion
        and not linear.config.defer_embedding_wgrad_compute
        and not linear.config.cpu_offloading
    )


def learns(weight: Tensor) -> bool:
    """Return whether the weight gets a gradient, in its own dtype."""
    return weight.requires_grad and not torch.is_autocast_enabled(weight.device.type)


def whole_product(rows: Tensor, weight_OI: Tensor) -> Tensor:
    """Return rows weight^T, [..., I] to [..., O], by the products of Megatron-Core's linear layers."""
    return _Product.apply(rows, weight_OI)


class _Product(Function):
    """It saves the weight, not a transposed view, which would keep what ZeRO 3 gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight_OI)
        return torch.matmul(rows, weight_OI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sent: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight_OI = ctx.saved_tensors
        to_rows = torch.matmul(sent, weight_OI)
        sent_TO, rows_TI = sent.reshape(-1, sent.shape[-1]), rows.reshape(-1, rows.shape[-1])
        return to_rows, torch.mm(sent_TO.contiguous().t(), rows_TI.contiguous())
