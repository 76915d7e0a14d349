"""RMSNorm, its gradients, and rotary positions as Triton kernels, with the arguments of `cpu/block.cpp`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import (
    VARYING,
    cdiv,
    each_once,
    load_block,
    next_power_of_2,
    programs_of,
    store_block,
    sum_parts,
)

NUMBERS = 2048  # that one program holds at least, if the rows are short
PROGRAMS = 256  # of the backward pass without a GPU; each adds up the weight's gradient over its rows


@kernel_operator("rms_norm", mutates={"out", "scale_N", "sum"}, bytes_moved=each_once)
def rms_norm(
    rows: Tensor,
    weight_H: Tensor,
    count: int,
    width: int,
    eps: float,
    out: Tensor,
    scale_N: Tensor,
    added: Tensor | None = None,
    sum: Tensor | None = None,
) -> None:
    """Compute scale[n] = 1 / sqrt(mean of rows[n]^2 + eps), out[n] = rows[n] * scale[n] * weight.

    added: sum = rows + added, rounded, is then computed, and takes the place of the rows.
    """
    if count:
        options = _options(width)
        arguments = (rows, added, weight_H, count, width, eps, sum, out, scale_N)
        run_kernel(_rms_norm, (cdiv(count, options["ROWS"]),), *arguments, **options)


@kernel_operator("rms_norm_backward", mutates={"to_rows", "to_weight_H"}, bytes_moved=each_once, launches=2)
def rms_norm_backward(
    sent: Tensor,
    rows: Tensor,
    weight_H: Tensor,
    scale_N: Tensor,
    count: int,
    width: int,
    to_rows: Tensor,
    to_weight_H: Tensor,
    sent_to_sum: Tensor | None = None,
) -> None:
    """Compute the gradients of the rows, plus `sent_to_sum`, and of the weight; sums are in one order."""
    if not count:
        to_weight_H.zero_()
        return
    options = _options(width)
    programs = min(programs_of(to_rows.device, PROGRAMS), cdiv(count, options["ROWS"]))
    part_PH = to_rows.new_empty(programs, width, dtype=torch.float32)
    arguments = (sent, sent_to_sum, rows, weight_H, scale_N, count, width, to_rows, part_PH)
    run_kernel(_rms_norm_backward, (programs,), *arguments, **options)
    sum_parts(part_PH, to_weight_H)


def _options(width: int) -> dict[str, int]:
    """Return the rows and the columns that a program holds at a time, and its warps."""
    block = next_power_of_2(width)
    tall = max(1, NUMBERS // block)
    return {"ROWS": tall, "BLOCK": block, "num_warps": min(16, max(4, block * tall // 1024))}


@triton.jit(do_not_specialize=VARYING)
def _rms_norm(  # type: ignore[no-untyped-def]
    rows, added, weight, count, width, eps, sum, out, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program handles ROWS whole rows."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row = load_block(rows, n, column, count, width).to(tl.float32)
    if added is not None:
        row += load_block(added, n, column, count, width).to(tl.float32)
        store_block(sum, n, column, count, width, row)
        row = row.to(sum.dtype.element_ty).to(tl.float32)  # the norm is that of the rounded sum
    factor = 1 / tl.sqrt(tl.sum(row * row, axis=1) / width + eps)
    tl.store(scale + n, factor, mask=n < count)
    by = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    store_block(out, n, column, count, width, row * factor[:, None] * by[None, :])


@triton.jit(do_not_specialize=VARYING)
def _rms_norm_backward(  # type: ignore[no-untyped-def]
    sent,
    sent_to_sum,
    rows,
    weight,
    scale,
    count,
    width,
    to_rows,
    part,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles every PROGRAMS-th group of ROWS rows, and writes its part of the weight's sum."""
    column = tl.arange(0, BLOCK)
    by = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    sum = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for begin in range(tl.program_id(0) * ROWS, count, step):
        n = tl.cast(begin, tl.int64) + tl.arange(0, ROWS)
        factor = tl.load(scale + n, mask=n < count, other=0)[:, None]
        normed = load_block(rows, n, column, count, width).to(tl.float32) * factor
        received = load_block(sent, n, column, count, width).to(tl.float32)
        sum += tl.sum(received * normed, axis=0)
        received *= by[None, :]
        share = tl.sum(received * normed, axis=1) / width
        to_row = factor * (received - share[:, None] * normed)
        if sent_to_sum is not None:
            to_row += load_block(sent_to_sum, n, column, count, width).to(tl.float32)
        store_block(to_rows, n, column, count, width, to_row)
    own = part + tl.program_id(0).to(tl.int64) * width
    tl.store(own + column, sum, mask=column < width)


ROTARY_NUMBERS = 2048  # pairs that one program rotates at most


@kernel_operator("rotate", mutates={"out"}, bytes_moved=each_once)
def rotate(
    heads: Tensor,
    from_s: int,
    from_b: int,
    from_n: int,
    out: Tensor,
    to_s: int,
    to_b: int,
    to_n: int,
    length: int,
    batch: int,
    count: int,
    half: int,
    cosine_SD: Tensor,
    sine_SD: Tensor,
    sign: float,
) -> None:
    """Rotate the halves of each head by their position's angles times `sign`, 1 or -1.

    from_s, from_b, from_n: strides of `heads` over positions, sequences and heads; to_...: those of `out`.
    half: columns of half a head.
    """
    first = (heads, out, (from_s, from_b, from_n), (to_s, to_b, to_n))
    _launch_rotation(first, first, 1, (length, batch, count, half), (cosine_SD, sine_SD), sign)


@kernel_operator("rotate_both", mutates={"out", "second_out"}, bytes_moved=each_once)
def rotate_both(
    heads: Tensor,
    second: Tensor,
    out: Tensor,
    second_out: Tensor,
    cosine_SD: Tensor,
    sine_SD: Tensor,
    sign: float,
) -> None:
    """Do `rotate` for queries and keys of one shape [S, B, heads, D] in one launch; columns lie together."""
    length, batch, count, size = heads.shape
    first = (heads, out, heads.stride(), out.stride())
    other = (second, second_out, second.stride(), second_out.stride())
    _launch_rotation(first, other, 2, (length, batch, count, size // 2), (cosine_SD, sine_SD), sign)


def _launch_rotation(
    first: tuple[Any, ...],
    other: tuple[Any, ...],
    number: int,
    sizes: tuple[int, int, int, int],
    angles: tuple[Tensor, Tensor],
    sign: float,
) -> None:
    """first, other: heads, result and their strides; number: how many of the two there are."""
    heads, out, strides, out_strides = first
    second, second_out, second_strides, second_out_strides = other
    if not out.numel():
        return
    length, batch, count, half = sizes
    block = next_power_of_2(half)
    tall = min(next_power_of_2(count), max(1, ROTARY_NUMBERS // block))
    grid = (length * batch, cdiv(count, tall), number)
    places = (*strides[:3], *out_strides[:3], *second_strides[:3], *second_out_strides[:3])
    arguments = (heads, out, second, second_out, *angles, *places, batch, count, half, sign)
    run_kernel(_rotate, grid, *arguments, HEADS=tall, BLOCK=block)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    heads,
    out,
    second,
    second_out,
    cosine,
    sine,
    from_s,
    from_b,
    from_n,
    to_s,
    to_b,
    to_n,
    second_from_s,
    second_from_b,
    second_from_n,
    second_to_s,
    second_to_b,
    second_to_n,
    batch,
    count,
    half,
    sign,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one position of one sequence, HEADS heads of one of two tensors."""
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    n = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    if tl.program_id(2) == 0:
        begin = heads + s * from_s + b * from_b
        end = out + s * to_s + b * to_b
        _rotate_heads(begin, end, from_n, to_n, cosine, sine, s, n, count, half, sign, BLOCK)
    else:
        begin = second + s * second_from_s + b * second_from_b
        end = second_out + s * second_to_s + b * second_to_b
        _rotate_heads(begin, end, second_from_n, second_to_n, cosine, sine, s, n, count, half, sign, BLOCK)


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    heads, out, from_n, to_n, cosine, sine, s, n, count, half, sign, BLOCK: tl.constexpr
):
    """Rotate the heads n of position s, whose first ones begin at `heads`."""
    column = tl.arange(0, BLOCK)
    inside = (n < count)[:, None] & (column < half)[None, :]
    angle = s * half + column
    cos = tl.load(cosine + angle, mask=column < half, other=0)[None, :]
    sin = tl.load(sine + angle, mask=column < half, other=0)[None, :] * sign
    place = heads + n[:, None] * from_n + column[None, :]
    first = tl.load(place, mask=inside, other=0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0).to(tl.float32)
    place = out + n[:, None] * to_n + column[None, :]
    tl.store(place, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)
