"""Weighted sums of rows and their gradients as Triton kernels, with the arguments of `cpu/rows.cpp`.

Sums are fp32, each in one order, without atomics. Sizes: T tokens, N (token, expert) pairs, H columns.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.blocks import row_block
from megamoe.kernels.triton.costs import each_once


@kernel_operator("combine", mutates={"out"}, bytes_moved=each_once)
def combine(
    rows_NH: Tensor,
    row_N: Tensor,
    ends_T: Tensor,
    weight_N: Tensor | None,
    tokens: int,
    width: int,
    out: Tensor,
) -> None:
    """Compute out[t] = sum over t's rows of weight[n] * rows[n]. weight_N: fp32, or None for 1."""
    if not rows_NH.numel():
        out.zero_()
        return
    block = row_block(width)
    _combine[(tokens, triton.cdiv(width, block))](rows_NH, row_N, ends_T, weight_N, width, out, BLOCK=block)


def _bytes_of_combine_backward(gradient_TH: Tensor, rows_NH: Tensor, *rest: Any, result: None) -> int:
    """A row of the gradient is read for each row."""
    return each_once(rows_NH, rows_NH, *rest, result=result)


@kernel_operator(
    "combine_backward", mutates={"to_rows_NH", "to_weight_N"}, bytes_moved=_bytes_of_combine_backward
)
def combine_backward(
    gradient_TH: Tensor,
    rows_NH: Tensor,
    token_N: Tensor,
    weight_N: Tensor,
    count: int,
    width: int,
    to_rows_NH: Tensor,
    to_weight_N: Tensor,
) -> None:
    """Compute to_rows[n] = weight[n] * gradient[token[n]], to_weight[n] = <rows[n], gradient[token[n]]>."""
    if count:
        arguments = (gradient_TH, rows_NH, token_N, weight_N, width, to_rows_NH, to_weight_N)
        _combine_backward[(count,)](*arguments, BLOCK=row_block(width))


@triton.jit
def _combine(rows, row, ends, weight, width, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program sums the rows of one token, in their order, in BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = tl.load(ends + token - 1, mask=token > 0, other=0)
    last = tl.load(ends + token)
    sum = tl.zeros([BLOCK], tl.float32)
    for place in range(first, last):
        n = tl.load(row + place)
        value = tl.load(rows + n * width + column, mask=inside, other=0).to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + n)
        sum += value
    tl.store(out + token * width + column, sum.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_backward(  # type: ignore[no-untyped-def]
    gradient, rows, token, weight, width, to_rows, to_weight, BLOCK: tl.constexpr
):
    """Each program handles one row, BLOCK columns at a time."""
    n = tl.program_id(0).to(tl.int64)
    begin = n * width
    sent_from = tl.load(token + n) * width
    factor = tl.load(weight + n)
    products = tl.zeros([BLOCK], tl.float32)
    for left in range(0, width, BLOCK):
        column = left + tl.arange(0, BLOCK)
        inside = column < width
        sent = tl.load(gradient + sent_from + column, mask=inside, other=0).to(tl.float32)
        products += sent * tl.load(rows + begin + column, mask=inside, other=0).to(tl.float32)
        tl.store(to_rows + begin + column, (factor * sent).to(to_rows.dtype.element_ty), mask=inside)
    tl.store(to_weight + n, tl.sum(products, axis=0))
