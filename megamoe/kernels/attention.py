"""Causal attention with rotary positions: PyTorch's, or on the CPU in fp32 the compiled library's.

At the sequence lengths of small models PyTorch's CPU kernel spends more time around its matrix products than
in them. It also needs queries and keys rotated and laid out by heads before. The library reads the heads
where the projection wrote them, rotates them while it reads, and multiplies with PyTorch's own BLAS.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megamoe.kernels.block import angles, rotary
from megamoe.kernels.choice import Kernels
from megamoe.kernels.library import Library


def causal_attention(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    rotary_base: float | None = None,
    scale: float | None = None,
    *,
    kernels: Kernels,
) -> Tensor:
    """Causal attention: return each position's weighted mean of the values up to it, [S, B, N * D].

    N / G query heads share a key head. rotary_base: rotate queries and keys by their positions, see `rotary`;
    None: do not. scale: the factor of the scores, by default 1 / sqrt(D).

    Raises:
        ValueError: if heads of odd size are to be rotated.
    """
    library = _library_for(query_SBND, key_SBGD, value_SBGD, kernels)
    if library is None:
        return plain_causal_attention(query_SBND, key_SBGD, value_SBGD, rotary_base, scale, kernels=kernels)
    size = query_SBND.shape[-1]
    scale = size**-0.5 if scale is None else scale
    turns: tuple[Tensor | None, Tensor | None] = (None, None)
    if rotary_base is not None:
        turns = angles(len(query_SBND), size, float(rotary_base), query_SBND.device)
    output_SBH: Tensor = _Attention.apply(query_SBND, key_SBGD, value_SBGD, *turns, scale, library)
    return output_SBH


def plain_causal_attention(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    rotary_base: float | None = None,
    scale: float | None = None,
    *,
    kernels: Kernels,
) -> Tensor:
    """Compute `causal_attention` by PyTorch's operator."""
    if rotary_base is not None:
        query_SBND, key_SBGD = (rotary(side, rotary_base, kernels) for side in (query_SBND, key_SBGD))
    return attend(query_SBND, key_SBGD, value_SBGD, is_causal=True, scale=scale)


def attend(query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, **options: Any) -> Tensor:
    """Apply scaled_dot_product_attention to heads in Megatron's order; return [S, B, N * D]."""
    query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query_SBND, key_SBGD, value_SBGD))
    grouped = query.shape[1] != key.shape[1]
    context_BNSD = functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)
    context_SBND = context_BNSD.permute(2, 0, 1, 3)
    return context_SBND.flatten(2)


def split_heads(mixed: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split the last dimension as torch.split does, but do not copy gradients that are adjacent in memory."""
    slices: tuple[Tensor, ...] = _Split.apply(mixed, sizes)
    return slices


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        return torch.split(mixed, sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _joined(gradients, ctx.sizes), None


def _joined(slices: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    first, place = slices[0], slices[0].storage_offset()
    stride = first.stride()
    for each, size in zip(slices, sizes, strict=True):
        same = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        beside = each.stride() == stride and stride[-1] == 1 and each.storage_offset() == place
        if not (same and beside):
            return torch.cat(slices, dim=-1)
        place += size
    return first.as_strided((*first.shape[:-1], sum(sizes)), stride)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosine: Tensor | None,
        sine: Tensor | None,
        scale: float,
        library: Library,
    ) -> Tensor:
        length, batch, heads, size = query.shape
        output = query.new_empty(length, batch, heads * size)
        log_sum_BNS = query.new_empty(batch, heads, length)
        ctx.settings = (length, batch, heads, key.shape[2], size, cosine, sine, scale)
        sides = (*_heads(query), *_heads(key), *_heads(value))
        library.call("attention", query.dtype, library.sgemm, *sides, *ctx.settings, output, log_sum_BNS)
        ctx.save_for_backward(query, key, value, output, log_sum_BNS)
        ctx.library = library
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum_BNS = ctx.saved_tensors
        to_query, to_key, to_value = _gradients_of(query, key, value)
        sides = (*_heads(query), *_heads(key), *_heads(value))
        gradients = (*_heads(to_query), *_heads(to_key), *_heads(to_value))
        passed = (*sides, *ctx.settings, output, log_sum_BNS, gradient.contiguous(), *gradients)
        ctx.library.call("attention_backward", query.dtype, ctx.library.sgemm, *passed)
        return to_query, to_key, to_value, None, None, None, None


def _gradients_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors for the gradients.

    For equal shapes they are adjacent in memory, as one projection's heads are.
    """
    if query.shape != key.shape:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    to_query, to_key, to_value = query.new_empty(*query.shape[:3], 3 * query.shape[3]).chunk(3, dim=-1)
    return to_query, to_key, to_value


def _heads(heads: Tensor) -> tuple[Tensor, int, int, int]:
    """Return the heads' address, and their strides over positions, sequences and heads."""
    position, sequence, head, _ = heads.stride()
    return heads, position, sequence, head


def _library_for(query: Tensor, key: Tensor, value: Tensor, kernels: Kernels) -> Library | None:
    """Return the library if it supports these tensors and there is a key head for each thread, else None."""
    library = kernels.library_on(query.device)
    sides = (query, key, value)
    fits = all(side.dtype == torch.float32 and side.dim() == 4 and side.stride(-1) == 1 for side in sides)
    if library is None or library.sgemm is None or not fits:
        return None
    alike = query.shape[:2] == key.shape[:2] and key.shape == value.shape and query.shape[3] == key.shape[3]
    shares = alike and query.shape[2] % key.shape[2] == 0
    return library if shares and key.shape[1] * key.shape[2] >= torch.get_num_threads() else None
