"""The grouped matrix product and its gradients as Triton kernels.

Rows are grouped by expert, and `ends_E` on the device tells where each group ends. The host never reads it:
the grid has a program for each tile that there can be at most, and each program finds its expert and its rows
by itself. Sizes: N rows, E experts, I inner and O outer columns of the weights [E, O, I].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import (
    cdiv,
    each_once,
    load_block,
    load_transposed,
    next_power_of_2,
    store_block,
    tile_for,
)

# Of fp32 products. "ieee" multiplies in fp32; "tf32x3" uses tensor cores three times and loses about one bit.
FP32_PRECISION = "ieee"


GROUP = tl.constexpr(8)  # tiles of rows


def _flops(rows: Tensor, *others: Any, result: None) -> int:
    inner, outer = others[3:5]
    return 2 * len(rows) * inner * outer


@kernel_operator("grouped_forward", mutates={"out_NO"}, bytes_moved=each_once, flops=_flops)
def forward(
    rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, experts: int, inner: int, outer: int, out_NO: Tensor
) -> None:
    """Compute out[n] = weight[expert of n] rows[n]. ends_E: int64, where each expert's rows end."""
    multiply(rows_NI, weight_EOI, ends_E, experts, inner, outer, out_NO, weight_is_out_in=True)


@kernel_operator("grouped_to_rows", mutates={"out_NI"}, bytes_moved=each_once, flops=_flops)
def to_rows(
    sent_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor, experts: int, inner: int, outer: int, out_NI: Tensor
) -> None:
    """Compute out[n] = weight[expert of n]^T sent[n], the gradient of the rows."""
    multiply(sent_NO, weight_EOI, ends_E, experts, outer, inner, out_NI, weight_is_out_in=False)


@kernel_operator("grouped_to_weight", mutates={"out_EOI"}, bytes_moved=each_once, flops=_flops)
def to_weight(
    sent_NO: Tensor, rows_NI: Tensor, ends_E: Tensor, experts: int, inner: int, outer: int, out_EOI: Tensor
) -> None:
    """Compute out[e] = the sum over e's rows of sent[n] rows[n]^T, the gradient of the weights.

    It is 0 for an expert without rows.
    """
    weigh(sent_NO, rows_NI, ends_E, experts, inner, outer, out_EOI)


def weigh(
    sent_NO: Tensor, rows_NI: Tensor, ends_E: Tensor, experts: int, inner: int, outer: int, out_EOI: Tensor
) -> None:
    """Compute `to_weight`."""
    if not out_EOI.numel():
        return
    tile = tile_for("to_weight", rows_NI)
    grid = (cdiv(outer, tile.rows) * cdiv(inner, tile.columns), experts)
    precision = precision_of(rows_NI)
    run_kernel(
        _to_weight,
        grid,
        sent_NO,
        rows_NI,
        ends_E,
        inner,
        outer,
        out_EOI,
        PRECISION=precision,
        **tile.options(),
    )


def multiply(
    rows: Tensor,
    weight: Tensor,
    ends_E: Tensor,
    experts: int,
    inner: int,
    outer: int,
    out: Tensor,
    *,
    weight_is_out_in: bool,
) -> None:
    """Compute out [N, outer] from rows [N, inner] and weights [E, outer, inner] or [E, inner, outer]."""
    if not out.numel():
        return
    constants = {"WEIGHT_IS_OUT_IN": weight_is_out_in}
    launch(_product, "product", rows, weight, ends_E, experts, inner, outer, out, **constants)


def launch(
    kernel: Any,
    kind: str,
    rows: Tensor,
    weight: Tensor,
    ends_E: Tensor,
    experts: int,
    inner: int,
    columns: int,
    *outputs: Tensor | None,
    **constants: Any,
) -> None:
    """Launch a kernel that multiplies rows by their expert's weight, with a program for each tile.

    Each expert may have one tile that is not full. The grid is one dimension, because a second one may have
    65,535 programs at most. kind: of the table of tiles. inner: columns of the rows. columns: of the result.
    """
    tile = tile_for(kind, rows)
    row_tiles = cdiv(len(rows), tile.rows) + min(experts, len(rows))
    grid = (row_tiles * cdiv(columns, tile.columns),)
    constants |= {"EXPERTS": next_power_of_2(experts), "PRECISION": precision_of(rows)}
    arguments = (rows, weight, ends_E, experts, inner, columns, *outputs)
    run_kernel(kernel, grid, *arguments, **constants, **tile.options())


def precision_of(rows: Tensor) -> str:
    """Return the `input_precision` of tl.dot."""
    return FP32_PRECISION if rows.dtype == torch.float32 else "tf32"


@triton.jit
def find_rows(  # type: ignore[no-untyped-def]
    ends, experts, columns, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return this program's (expert, first row, number of rows, first column).

    Tiles are counted expert by expert. Within an expert, GROUP tiles of rows go through the columns together:
    what runs at a time shares rows and columns of the weight in the L2 cache. The expert is `experts` for a
    program beyond the last tile. The first row is int64. Offsets from it are int32, as a tensor of 64-bit
    addresses would take twice the registers.
    """
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // across
    index = tl.arange(0, EXPERTS)
    inside = index < experts
    end = tl.load(ends + index, mask=inside, other=0)
    start = tl.load(ends + index - 1, mask=inside & (index > 0), other=0)
    tiles = tl.where(inside, (end - start + ROWS - 1) // ROWS, 0)
    expert = tl.sum((inside & (tl.cumsum(tiles, axis=0) <= tile)).to(tl.int32), axis=0)
    before = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(index == expert, tiles, 0), axis=0).to(tl.int32)
    place = tl.program_id(0) - before.to(tl.int32) * across  # among the tiles of the expert
    group = place // (GROUP * across) * GROUP
    tall = tl.maximum(tl.minimum(own - group, GROUP), 1)
    place %= GROUP * across
    first = tl.sum(tl.where(index == expert, start, 0), axis=0) + (group + place % tall) * ROWS
    last = tl.sum(tl.where(index == expert, end, 0), axis=0)
    rows = tl.minimum(last - first, ROWS).to(tl.int32)
    return expert, first, rows, place // tall * COLUMNS


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    rows,
    weight,
    ends,
    experts,
    inner,
    outer,
    out,
    EXPERTS: tl.constexpr,
    WEIGHT_IS_OUT_IN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes ROWS x COLUMNS of the result, of one expert's rows."""
    expert, first, count, left = find_rows(ends, experts, outer, EXPERTS, ROWS, COLUMNS)
    if expert < experts:
        row = tl.arange(0, ROWS)
        column = left + tl.arange(0, COLUMNS)
        own = weight + expert.to(tl.int64) * inner * outer
        rows += first * inner
        sum = tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, inner, DEPTH):
            sum = add_product(
                sum, rows, row, count, own, column, outer, depth, inner, WEIGHT_IS_OUT_IN, PRECISION, DEPTH
            )
        store_block(out + first * outer, row, column, count, outer, sum)


@triton.jit
def add_product(  # type: ignore[no-untyped-def]
    sum,
    rows,
    row,
    count,
    weight,
    column,
    outer,
    depth,
    inner,
    WEIGHT_IS_OUT_IN: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return sum + rows[row, depth :] weight[column, depth :]^T over DEPTH places, 0 beyond the edges.

    PRECISION "tf32" multiplies 16 bits as they are; any other one converts both factors to fp32.
    """
    place = depth + tl.arange(0, DEPTH)
    left = load_block(rows, row, place, count, inner)
    if PRECISION != "tf32":
        left = left.to(tl.float32)
    if WEIGHT_IS_OUT_IN:
        right = load_transposed(weight, column, place, outer, inner)
    else:
        right = load_block(weight, place, column, inner, outer)
    if PRECISION != "tf32":
        right = right.to(tl.float32)
    return tl.dot(left, right, sum, input_precision=PRECISION)


@triton.jit
def _to_weight(  # type: ignore[no-untyped-def]
    sent,
    rows,
    ends,
    inner,
    outer,
    out,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes ROWS x COLUMNS of one expert's gradient, DEPTH of its rows at a time."""
    expert = tl.program_id(1)
    across = tl.cdiv(inner, COLUMNS)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    high = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    wide = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(first, last, DEPTH):
        row = tl.arange(0, DEPTH)
        far = tl.cast(begin, tl.int64)
        left = load_transposed(sent + far * outer, row, high, last - begin, outer)
        right = load_block(rows + far * inner, row, wide, last - begin, inner)
        sum = tl.dot(left, right, sum, input_precision=PRECISION)
    store_block(out + expert.to(tl.int64) * inner * outer, high, wide, outer, inner, sum)
