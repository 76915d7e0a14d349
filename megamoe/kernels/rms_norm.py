"""RMSNorm of a transformer block, with a reference implementation. H: hidden columns."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels, RowKernels

if TYPE_CHECKING:
    from megamoe.kernels.triton import TritonKernels

WIDEST = 16384  # columns that a GPU's program can hold


def rms_norm(hidden: Tensor, weight_H: Tensor, eps: float, kernels: Kernels) -> Tensor:
    """Apply RMSNorm over the last dimension; [..., H] to the same shape (Zhang and Sennrich 2019, eq. 4)."""
    library = _norms_for(hidden, weight_H, kernels)
    if library is None:
        return functional.rms_norm(hidden, weight_H.shape, weight_H, eps)
    return _RMSNorm.apply(hidden, weight_H, eps, library)


def _norms_for(hidden: Tensor, weight_H: Tensor, kernels: Kernels) -> RowKernels | None:
    return kernels.rows_for(hidden) if _fits(hidden, weight_H) else None


def _fits(hidden: Tensor, weight_H: Tensor) -> bool:
    alike = hidden.dtype == weight_H.dtype and hidden.shape[-1:] == weight_H.shape
    return alike and weight_H.is_contiguous() and len(weight_H) <= WIDEST


def summed_rms_norm(
    hidden: Tensor, added: Tensor | None, weight_H: Tensor, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Return hidden + added, and RMSNorm of this sum; [..., H] each. added: None for 0.

    On CUDA the sum is part of the norm's pass over the memory, and in the backward pass its gradient is added
    in the norm's.
    """
    library = kernels.triton_for(hidden)
    if (
        library is None
        or not _fits(hidden, weight_H)
        or (added is not None and (added.dtype, added.shape) != (hidden.dtype, hidden.shape))
    ):
        total = hidden if added is None else hidden + added
        return total, rms_norm(total, weight_H, eps, kernels)
    return _SummedRMSNorm.apply(hidden, added, weight_H, eps, library)


class _SummedRMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, added: Tensor | None, weight_H: Tensor, eps: float, library: "TritonKernels"
    ) -> tuple[Tensor, Tensor]:
        count, width = hidden.numel() // len(weight_H), len(weight_H)
        normed, scale_N = torch.empty_like(hidden), hidden.new_empty(count, dtype=torch.float32)
        sums = (None, None) if added is None else (added.contiguous(), torch.empty_like(hidden))
        library.rms_norm(hidden, weight_H, count, width, eps, normed, scale_N, *sums)
        total = hidden.view_as(hidden) if sums[1] is None else sums[1]
        ctx.save_for_backward(hidden if added is None else total, weight_H, scale_N)
        ctx.library, ctx.has_added = library, added is not None
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_total: Tensor, to_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight_H, scale_N = ctx.saved_tensors
        to_hidden, to_weight_H = torch.empty_like(total), torch.empty_like(weight_H)
        arguments = (to_normed.contiguous(), total, weight_H, scale_N, len(scale_N), len(weight_H))
        ctx.library.rms_norm_backward(*arguments, to_hidden, to_weight_H, to_total.contiguous())
        return to_hidden, to_hidden if ctx.has_added else None, to_weight_H, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_H: Tensor, eps: float, library: RowKernels) -> Tensor:
        count, width = hidden.numel() // len(weight_H), len(weight_H)
        normed, scale_N = torch.empty_like(hidden), hidden.new_empty(count, dtype=torch.float32)
        library.rms_norm(hidden, weight_H, count, width, eps, normed, scale_N)
        ctx.save_for_backward(hidden, weight_H, scale_N)
        ctx.library = library
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight_H, scale_N = ctx.saved_tensors
        to_hidden, to_weight_H = torch.empty_like(hidden), torch.empty_like(weight_H, dtype=torch.float32)
        arguments = (gradient.contiguous(), hidden, weight_H, scale_N, len(scale_N), len(weight_H))
        ctx.library.rms_norm_backward(*arguments, to_hidden, to_weight_H)
        return to_hidden, to_weight_H.to(weight_H.dtype), None, None
