"""SwiGLU over rows of gate | value, and the experts' FFNs with SwiGLU beside the products, as Triton
kernels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import bytes_of, cdiv, each_once, inside, row_block, store_block, tile_for
from megamoe.kernels.triton.products import add_product, find_rows, launch, multiply, weigh


@kernel_operator("swiglu", mutates={"out_NF"}, bytes_moved=each_once)
def swiglu(rows_N2F: Tensor, count: int, width: int, out_NF: Tensor, weight_N: Tensor | None = None) -> None:
    """Compute gate * sigmoid(gate) * value, times each row's weight: [N, 2F] of gate | value to [N, F]."""
    if out_NF.numel():
        block = row_block(width)
        run_kernel(_swiglu, (count, cdiv(width, block)), rows_N2F, width, out_NF, weight_N, BLOCK=block)


@kernel_operator("swiglu_backward", mutates={"to_rows_N2F", "to_weight_N"}, bytes_moved=each_once)
def swiglu_backward(
    gradient_NF: Tensor,
    rows_N2F: Tensor,
    count: int,
    width: int,
    to_rows_N2F: Tensor,
    weight_N: Tensor | None = None,
    to_weight_N: Tensor | None = None,
) -> None:
    """Compute the gradients of both halves, [N, 2F], and of the weights, fp32."""
    if count:
        arguments = (gradient_NF, rows_N2F, width, to_rows_N2F, weight_N, to_weight_N)
        run_kernel(_swiglu_backward, (count,), *arguments, BLOCK=row_block(width))


@triton.jit
def _swiglu(rows, width, out, weight, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles one row, BLOCK columns of each half."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gates = rows + 2 * n * width + column
    gate = tl.load(gates, mask=inside, other=0).to(tl.float32)
    value = tl.load(gates + width, mask=inside, other=0).to(tl.float32)
    active = gate * tl.sigmoid(gate) * value
    if weight is not None:
        active *= tl.load(weight + n)
    tl.store(out + n * width + column, active.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    gradient, rows, width, to_rows, weight, to_weight, BLOCK: tl.constexpr
):
    """Each program handles one row, BLOCK columns of each half at a time."""
    n = tl.program_id(0).to(tl.int64)
    products = tl.zeros([BLOCK], tl.float32)
    for left in range(0, width, BLOCK):
        column = left + tl.arange(0, BLOCK)
        inside = column < width
        gates = rows + 2 * n * width + column
        to_gates = to_rows + 2 * n * width + column
        gate = tl.load(gates, mask=inside, other=0).to(tl.float32)
        value = tl.load(gates + width, mask=inside, other=0).to(tl.float32)
        sent = tl.load(gradient + n * width + column, mask=inside, other=0).to(tl.float32)
        share = tl.sigmoid(gate)
        if weight is not None:
            products += sent * gate * share * value
            sent *= tl.load(weight + n)
        to_gate = sent * value * share * (1 + gate * (1 - share))
        tl.store(to_gates, to_gate.to(to_rows.dtype.element_ty), mask=inside)
        tl.store(to_gates + width, (sent * gate * share).to(to_rows.dtype.element_ty), mask=inside)
    if weight is not None:
        tl.store(to_weight + n, tl.sum(products, axis=0))


def _forward_bytes(*arguments: Any, result: None) -> int:
    """The activated rows are written and read."""
    return each_once(*arguments, result=result) + bytes_of(arguments[8])


def _forward_flops(rows_NH: Tensor, *others: Any, result: None) -> int:
    hidden_size, ffn_size = others[4:6]
    return 6 * len(rows_NH) * hidden_size * ffn_size


@kernel_operator(
    "experts",
    mutates={"hidden_NG", "active_NF", "out_NH"},
    bytes_moved=_forward_bytes,
    flops=_forward_flops,
    launches=2,
)
def experts(
    rows_NH: Tensor,
    up_EGH: Tensor,
    down_EHF: Tensor,
    ends_E: Tensor,
    count: int,
    hidden_size: int,
    ffn_size: int,
    hidden_NG: Tensor,
    active_NF: Tensor,
    out_NH: Tensor,
    weight_N: Tensor | None = None,
) -> None:
    """Compute hidden = up rows (gate | value), active = SwiGLU(hidden), out = down active. G = 2 F.

    weight_N: fp32; active is multiplied by it.
    """
    if not len(rows_NH):
        return
    given = (rows_NH, up_EGH, ends_E, count, hidden_size, ffn_size)
    launch(_up, "up", *given, hidden_NG, active_NF, weight_N)
    sizes = (count, ffn_size, hidden_size)
    multiply(active_NF, down_EHF, ends_E, *sizes, out_NH, weight_is_out_in=True)


def _cost_of_backward(
    sent_NH: Tensor, rows_NH: Tensor, up_EGH: Tensor, down_EHF: Tensor, ends_E: Tensor, *others: Any
) -> tuple[int, int]:
    """Return (bytes, FLOPs) of the product for the activated rows and of the gradients that are wanted."""
    _, hidden_size, ffn_size, hidden_NG, active_NF, to_rows_NH, to_up_EGH, to_down_EHF, *weights = others
    product = 2 * len(rows_NH) * hidden_size * ffn_size
    moved = bytes_of(sent_NH, down_EHF, ends_E, hidden_NG, hidden_NG, active_NF, *weights)
    flops = product
    if to_down_EHF is not None:
        moved, flops = moved + bytes_of(sent_NH, active_NF, to_down_EHF), flops + product
    if to_rows_NH is not None:
        moved, flops = moved + bytes_of(hidden_NG, up_EGH, to_rows_NH), flops + 2 * product
    if to_up_EGH is not None:
        moved, flops = moved + bytes_of(hidden_NG, rows_NH, to_up_EGH), flops + 2 * product
    return moved, flops


@kernel_operator(
    "experts_backward",
    mutates={"hidden_NG", "active_NF", "to_rows_NH", "to_up_EGH", "to_down_EHF", "to_weight_N"},
    bytes_moved=lambda *arguments, result: _cost_of_backward(*arguments)[0],
    flops=lambda *arguments, result: _cost_of_backward(*arguments)[1],
    launches=4,
)
def experts_backward(
    sent_NH: Tensor,
    rows_NH: Tensor,
    up_EGH: Tensor,
    down_EHF: Tensor,
    ends_E: Tensor,
    count: int,
    hidden_size: int,
    ffn_size: int,
    hidden_NG: Tensor,
    active_NF: Tensor,
    to_rows_NH: Tensor | None,
    to_up_EGH: Tensor | None,
    to_down_EHF: Tensor | None,
    weight_N: Tensor | None = None,
    to_weight_N: Tensor | None = None,
) -> None:
    """Compute the gradients that are not None. It writes the gradient of `hidden_NG` over it, and
    active_NF.

    weight_N, to_weight_N: fp32, both or neither; see `experts`.
    """
    if len(rows_NH):
        given = (sent_NH, down_EHF, ends_E, count, hidden_size, ffn_size)
        kind, part_NA = "down_backward", None
        if weight_N is not None:
            kind = "weighted_down_backward"
            part_NA = weight_N.new_empty(len(weight_N), cdiv(ffn_size, tile_for(kind, sent_NH).columns))
        launch(_down_backward, kind, *given, hidden_NG, active_NF, weight_N, part_NA)
        if part_NA is not None and to_weight_N is not None:
            torch.sum(part_NA, 1, out=to_weight_N)
    if to_down_EHF is not None:
        weigh(sent_NH, active_NF, ends_E, count, ffn_size, hidden_size, to_down_EHF)
    if to_rows_NH is not None:
        sizes = (count, 2 * ffn_size, hidden_size)
        multiply(hidden_NG, up_EGH, ends_E, *sizes, to_rows_NH, weight_is_out_in=False)
    if to_up_EGH is not None:
        weigh(hidden_NG, rows_NH, ends_E, count, hidden_size, 2 * ffn_size, to_up_EGH)


@triton.jit
def load_half(both, row, column, rows, width):  # type: ignore[no-untyped-def]
    """Return a block of the first half of rows of 2 width columns, 0 beyond the edges."""
    place = row[:, None] * 2 * width + column[None, :]
    return tl.load(both + place, mask=inside(row, column, rows, width), other=0)


@triton.jit
def store_half(both, row, column, rows, width, block):  # type: ignore[no-untyped-def]
    """Write a block of the first half of rows of 2 width columns, within the edges."""
    place = row[:, None] * 2 * width + column[None, :]
    tl.store(both + place, block.to(both.dtype.element_ty), mask=inside(row, column, rows, width))


@triton.jit
def _up(  # type: ignore[no-untyped-def]
    rows,
    up,
    ends,
    experts,
    inner,
    width,
    hidden,
    active,
    weight,
    EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes COLUMNS of the gate, those of the value, and the activation of both."""
    expert, first, count, left = find_rows(ends, experts, width, EXPERTS, ROWS, COLUMNS)
    if expert < experts:
        row = tl.arange(0, ROWS)
        column = left + tl.arange(0, COLUMNS)
        gates = up + expert.to(tl.int64) * 2 * width * inner
        values = gates + tl.cast(width, tl.int64) * inner
        rows += first * inner
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        value = tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, inner, DEPTH):
            gate = add_product(
                gate, rows, row, count, gates, column, width, depth, inner, True, PRECISION, DEPTH
            )
            value = add_product(
                value, rows, row, count, values, column, width, depth, inner, True, PRECISION, DEPTH
            )
        both = hidden + first * 2 * width
        # The activation is that of the rounded numbers, which the backward pass reads.
        gate = gate.to(hidden.dtype.element_ty)
        value = value.to(hidden.dtype.element_ty)
        store_half(both, row, column, count, width, gate)
        store_half(both + width, row, column, count, width, value)
        gate = gate.to(tl.float32)
        product = gate * tl.sigmoid(gate) * value.to(tl.float32)
        if weight is not None:
            product *= tl.load(weight + first + row, mask=row < count, other=0)[:, None]
        store_block(active + first * width, row, column, count, width, product)


@triton.jit
def _down_backward(  # type: ignore[no-untyped-def]
    sent,
    down,
    ends,
    experts,
    inner,
    width,
    hidden,
    active,
    weight,
    parts,
    EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes COLUMNS of the activated rows' gradient and what follows from it.

    parts: of the weights' gradients, a number of each row and program; with `weight` alone.
    """
    expert, first, count, left = find_rows(ends, experts, width, EXPERTS, ROWS, COLUMNS)
    if expert < experts:
        row = tl.arange(0, ROWS)
        column = left + tl.arange(0, COLUMNS)
        own = down + expert.to(tl.int64) * inner * width
        sent += first * inner
        sum = tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, inner, DEPTH):
            sum = add_product(
                sum, sent, row, count, own, column, width, depth, inner, False, PRECISION, DEPTH
            )
        both = hidden + first * 2 * width
        # Rounded as between a product and a pass of its own.
        received = sum.to(hidden.dtype.element_ty).to(tl.float32)
        gate = load_half(both, row, column, count, width).to(tl.float32)
        value = load_half(both + width, row, column, count, width).to(tl.float32)
        share = tl.sigmoid(gate)
        activated = gate * share * value
        if weight is not None:
            place = (first + row) * tl.cdiv(width, COLUMNS) + left // COLUMNS
            tl.store(parts + place, tl.sum(received * activated, axis=1), mask=row < count)
            factor = tl.load(weight + first + row, mask=row < count, other=0)[:, None]
            received *= factor
            activated *= factor
        to_gate = received * value * share * (1 + gate * (1 - share))
        store_half(both, row, column, count, width, to_gate)
        store_half(both + width, row, column, count, width, received * gate * share)
        store_block(active + first * width, row, column, count, width, activated)
