"""RMSNorm and its gradients as Triton kernels, with the arguments of `cpu/block.cpp`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.costs import each_once

NUMBERS = 2048  # that one program holds at least, if the rows are short
PROGRAMS = 256  # of the backward pass; each adds up the weight's gradient over its rows


@kernel_operator("rms_norm", mutates={"out", "scale_N"}, bytes_moved=each_once)
def rms_norm(
    rows: Tensor, weight_H: Tensor, count: int, width: int, eps: float, out: Tensor, scale_N: Tensor
) -> None:
    """Compute scale[n] = 1 / sqrt(mean of rows[n]^2 + eps), out[n] = rows[n] * scale[n] * weight."""
    if count:
        block, tall = _blocks(width)
        grid = (triton.cdiv(count, tall),)
        options = {"ROWS": tall, "BLOCK": block, "num_warps": _warps(block * tall)}
        _rms_norm[grid](rows, weight_H, count, width, eps, out, scale_N, **options)


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
) -> None:
    """Compute the gradients of the rows and of the weight, the latter in fp32 and in one order of sums."""
    if not count:
        to_weight_H.zero_()
        return
    block, tall = _blocks(width)
    programs = min(PROGRAMS, triton.cdiv(count, tall))
    part_PH = torch.empty(programs, width, dtype=torch.float32, device=rows.device)
    options = {"ROWS": tall, "BLOCK": block, "num_warps": _warps(block * tall)}
    arguments = (sent, rows, weight_H, scale_N, count, width, to_rows, part_PH)
    _rms_norm_backward[(programs,)](*arguments, **options)
    torch.sum(part_PH, dim=0, out=to_weight_H)


def _blocks(width: int) -> tuple[int, int]:
    """Return the columns and the rows that a program holds at a time."""
    block = triton.next_power_of_2(width)
    return block, max(1, NUMBERS // block)


def _warps(numbers: int) -> int:
    return min(16, max(4, numbers // 1024))


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    rows, weight, count, width, eps, out, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program handles ROWS whole rows."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (n < count)[:, None] & (column < width)[None, :]
    place = n[:, None] * width + column[None, :]
    row = tl.load(rows + place, mask=inside, other=0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(row * row, axis=1) / width + eps)
    tl.store(scale + n, factor, mask=n < count)
    by = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    tl.store(out + place, (row * factor[:, None] * by[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(  # type: ignore[no-untyped-def]
    sent, rows, weight, scale, count, width, to_rows, part, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program handles every PROGRAMS-th group of ROWS rows, and writes its part of the weight's sum."""
    column = tl.arange(0, BLOCK)
    by = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    sum = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for begin in range(tl.program_id(0) * ROWS, count, step):
        n = tl.cast(begin, tl.int64) + tl.arange(0, ROWS)
        inside = (n < count)[:, None] & (column < width)[None, :]
        place = n[:, None] * width + column[None, :]
        factor = tl.load(scale + n, mask=n < count, other=0)[:, None]
        normed = tl.load(rows + place, mask=inside, other=0).to(tl.float32) * factor
        received = tl.load(sent + place, mask=inside, other=0).to(tl.float32)
        sum += tl.sum(received * normed, axis=0)
        received *= by[None, :]
        share = tl.sum(received * normed, axis=1) / width
        to_row = factor * (received - share[:, None] * normed)
        tl.store(to_rows + place, to_row.to(to_rows.dtype.element_ty), mask=inside)
    own = part + tl.program_id(0).to(tl.int64) * width
    tl.store(own + column, sum, mask=column < width)
