"""RMSNorm and rotary positions of a transformer block, each with a reference implementation.

Sizes: S positions, B sequences, heads of D columns, H hidden columns.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megamoe.kernels.choice import Kernels, RowKernels

WIDEST = 16384  # columns that a GPU's program can hold


def rms_norm(hidden: Tensor, weight_H: Tensor, eps: float, kernels: Kernels) -> Tensor:
    """Apply RMSNorm over the last dimension; [..., H] to the same shape (Zhang and Sennrich 2019, eq. 4)."""
    library = _norms_for(hidden, weight_H, kernels)
    if library is None:
        return functional.rms_norm(hidden, weight_H.shape, weight_H, eps)
    normed: Tensor = _RMSNorm.apply(hidden, weight_H, eps, library)
    return normed


def _norms_for(hidden: Tensor, weight_H: Tensor, kernels: Kernels) -> RowKernels | None:
    library = kernels.rows_for(hidden)
    fits = hidden.dtype == weight_H.dtype and weight_H.is_contiguous() and hidden.shape[-1:] == weight_H.shape
    return library if fits and len(weight_H) <= WIDEST else None


def summed_rms_norm(
    hidden: Tensor, added: Tensor | None, weight_H: Tensor, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Return hidden + added, and RMSNorm of this sum; [..., H] each. added: None for 0.

    On CUDA the sum is part of the norm's pass over the memory, and in the backward pass its gradient is added
    in the norm's.
    """
    library = _norms_for(hidden, weight_H, kernels) if kernels.uses_triton(hidden.device) else None
    if library is None or (added is not None and (added.dtype, added.shape) != (hidden.dtype, hidden.shape)):
        total = hidden if added is None else hidden + added
        return total, rms_norm(total, weight_H, eps, kernels)
    both: tuple[Tensor, Tensor] = _SummedRMSNorm.apply(hidden, added, weight_H, eps, library)
    return both


class _SummedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, added: Tensor | None, weight_H: Tensor, eps: float, library: RowKernels
    ) -> tuple[Tensor, Tensor]:
        count, width = hidden.numel() // len(weight_H), len(weight_H)
        normed, scale_N = torch.empty_like(hidden), hidden.new_empty(count, dtype=torch.float32)
        if added is None:
            total = hidden.view_as(hidden)
            library.call("rms_norm", hidden.dtype, hidden, weight_H, count, width, eps, normed, scale_N)
        else:
            total = torch.empty_like(hidden)
            arguments = (hidden, added.contiguous(), weight_H, count, width, eps, total, normed, scale_N)
            library.call("summed_rms_norm", hidden.dtype, *arguments)
        ctx.save_for_backward(hidden if added is None else total, weight_H, scale_N)
        ctx.library, ctx.has_added = library, added is not None
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_total: Tensor, to_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight_H, scale_N = ctx.saved_tensors
        to_hidden, to_weight_H = torch.empty_like(total), torch.empty_like(weight_H)
        sides = (to_normed.contiguous(), to_total.contiguous(), total, weight_H, scale_N)
        arguments = (*sides, len(scale_N), len(weight_H), to_hidden, to_weight_H)
        ctx.library.call("summed_rms_norm_backward", total.dtype, *arguments)
        return to_hidden, to_hidden if ctx.has_added else None, to_weight_H, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_H: Tensor, eps: float, library: RowKernels) -> Tensor:
        count, width = hidden.numel() // len(weight_H), len(weight_H)
        normed, scale_N = torch.empty_like(hidden), hidden.new_empty(count, dtype=torch.float32)
        library.call("rms_norm", hidden.dtype, hidden, weight_H, count, width, eps, normed, scale_N)
        ctx.save_for_backward(hidden, weight_H, scale_N)
        ctx.library = library
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight_H, scale_N = ctx.saved_tensors
        to_hidden, to_weight_H = torch.empty_like(hidden), torch.empty_like(weight_H, dtype=torch.float32)
        arguments = (gradient.contiguous(), hidden, weight_H, scale_N, len(scale_N), len(weight_H))
        ctx.library.call("rms_norm_backward", hidden.dtype, *arguments, to_hidden, to_weight_H)
        return to_hidden, to_weight_H.to(weight_H.dtype), None, None


def rotary(heads_SBND: Tensor, base: float, kernels: Kernels) -> Tensor:
    """Rotate queries or keys by their positions 0 .. S-1, in halves of a head as Megatron-Core does.

    [S, B, heads, D] to the same shape; from a kernel it is a view of memory in the order [B, heads, S, D].
    Angles and arithmetic are fp32. Source: Su et al. 2021 (RoFormer), section 3.2.2.
    """
    tables_SD = angles(len(heads_SBND), heads_SBND.shape[-1], float(base), heads_SBND.device)
    return turned(heads_SBND, *tables_SD, kernels)


def turned(heads_SBND: Tensor, cosine_SD: Tensor, sine_SD: Tensor, kernels: Kernels) -> Tensor:
    """Rotate heads by the given angles, fp32 [S, D / 2], as `rotary` does."""
    library = kernels.rows_on(heads_SBND.device)
    if library is None or heads_SBND.dtype not in library.dtypes:
        return plain_rotary(heads_SBND, cosine_SD, sine_SD)
    turned_SBND: Tensor = _Rotary.apply(heads_SBND, cosine_SD, sine_SD, library)
    return turned_SBND


def turn_sides(
    query_SBND: Tensor, key_SBND: Tensor, value_SBND: Tensor, base: float, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys as `rotary` does; return them and the values.

    By Triton's kernels the rotated heads are contiguous, and for sides of one shape the three gradients are
    slices of one tensor [S, B, heads, 3 D], so that `split_heads` need not copy them together.
    """
    if not kernels.uses_triton(query_SBND.device) or query_SBND.dtype != key_SBND.dtype:
        return rotary(query_SBND, base, kernels), rotary(key_SBND, base, kernels), value_SBND
    library = kernels.rows_on(query_SBND.device)
    if library is None or query_SBND.dtype not in library.dtypes:
        return rotary(query_SBND, base, kernels), rotary(key_SBND, base, kernels), value_SBND
    tables_SD = angles(len(query_SBND), query_SBND.shape[-1], float(base), query_SBND.device)
    sides: tuple[Tensor, Tensor, Tensor] = _TurnSides.apply(
        query_SBND, key_SBND, value_SBND, *tables_SD, library
    )
    return sides


class _TurnSides(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosine_SD: Tensor,
        sine_SD: Tensor,
        library: RowKernels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.angles, ctx.library = (cosine_SD, sine_SD), library
        query, key = (
            _rotate(side, side.new_empty(side.shape), ctx.angles, 1.0, library) for side in (query, key)
        )
        return query, key, value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *sent: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = gradients_of(*sent)
        for side, gradient in ((query, sent[0]), (key, sent[1])):
            _rotate(gradient, side, ctx.angles, -1.0, ctx.library)
        return query, key, value.copy_(sent[2]), None, None, None


def gradients_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the gradients of heads [S, B, heads, D].

    For equal shapes they are adjacent in memory, as one projection's heads are.
    """
    if query.shape != key.shape:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    to_query, to_key, to_value = query.new_empty(*query.shape[:3], 3 * query.shape[3]).chunk(3, dim=-1)
    return to_query, to_key, to_value


@lru_cache(maxsize=8)
def angles(length: int, size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of s * base^(-2i / size), fp32 [S, size / 2] each; ValueError if size is odd."""
    if size % 2:
        raise ValueError(f"rotary positions turn columns in pairs: found heads of {size}")
    powers = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    angle_SD = torch.outer(torch.arange(length, device=device, dtype=torch.float32), 1.0 / base**powers)
    return angle_SD.cos(), angle_SD.sin()


def plain_rotary(heads_SBND: Tensor, cosine_SD: Tensor, sine_SD: Tensor) -> Tensor:
    """Compute `rotary` by PyTorch's operators."""
    wide = torch.promote_types(heads_SBND.dtype, torch.float32)
    first, second = heads_SBND.to(wide).chunk(2, dim=-1)
    cosine, sine = cosine_SD[:, None, None], sine_SD[:, None, None]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(heads_SBND.dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads_SBND: Tensor, cosine_SD: Tensor, sine_SD: Tensor, library: RowKernels
    ) -> Tensor:
        ctx.angles, ctx.library = (cosine_SD, sine_SD), library
        length, batch, heads, size = heads_SBND.shape
        turned_BNSD = heads_SBND.new_empty(batch, heads, length, size)
        return _rotate(heads_SBND, turned_BNSD.permute(2, 0, 1, 3), ctx.angles, 1.0, library)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SBND: Tensor) -> tuple[Tensor, None, None, None]:
        output_SBND = gradient_SBND.new_empty(gradient_SBND.shape)
        return _rotate(gradient_SBND, output_SBND, ctx.angles, -1.0, ctx.library), None, None, None


def _rotate(
    heads_SBND: Tensor, output_SBND: Tensor, angles: tuple[Tensor, Tensor], turn: float, library: RowKernels
) -> Tensor:
    if heads_SBND.stride(-1) != 1:
        heads_SBND = heads_SBND.contiguous()
    length, batch, heads, size = heads_SBND.shape
    sizes = (length, batch, heads, size // 2)
    (from_s, from_b, from_n, _), (to_s, to_b, to_n, _) = heads_SBND.stride(), output_SBND.stride()
    sides = (heads_SBND, from_s, from_b, from_n, output_SBND, to_s, to_b, to_n)
    library.call("rotate", heads_SBND.dtype, *sides, *sizes, *angles, turn)
    return output_SBND
