"""SwiGLU over rows of gate | value as Triton kernels, with the arguments of `cpu/rows.cpp`."""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.blocks import row_block
from megamoe.kernels.triton.costs import each_once


@kernel_operator("swiglu", mutates={"out_NF"}, bytes_moved=each_once)
def swiglu(rows_N2F: Tensor, count: int, width: int, out_NF: Tensor) -> None:
    """Compute gate * sigmoid(gate) * value: [N, 2F] of gate | value to [N, F]."""
    if out_NF.numel():
        block = row_block(width)
        _swiglu[(count, triton.cdiv(width, block))](rows_N2F, width, out_NF, BLOCK=block)


@kernel_operator("swiglu_backward", mutates={"to_rows_N2F"}, bytes_moved=each_once)
def swiglu_backward(
    gradient_NF: Tensor, rows_N2F: Tensor, count: int, width: int, to_rows_N2F: Tensor
) -> None:
    """Compute the gradients of both halves: [N, 2F]."""
    if gradient_NF.numel():
        block = row_block(width)
        grid = (count, triton.cdiv(width, block))
        _swiglu_backward[grid](gradient_NF, rows_N2F, width, to_rows_N2F, BLOCK=block)


@triton.jit
def _swiglu(rows, width, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles one row, BLOCK columns of each half."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gates = rows + 2 * n * width + column
    gate = tl.load(gates, mask=inside, other=0).to(tl.float32)
    value = tl.load(gates + width, mask=inside, other=0).to(tl.float32)
    tl.store(
        out + n * width + column, (gate * tl.sigmoid(gate) * value).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _swiglu_backward(gradient, rows, width, to_rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles one row, BLOCK columns of each half."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gates = rows + 2 * n * width + column
    to_gates = to_rows + 2 * n * width + column
    gate = tl.load(gates, mask=inside, other=0).to(tl.float32)
    value = tl.load(gates + width, mask=inside, other=0).to(tl.float32)
    sent = tl.load(gradient + n * width + column, mask=inside, other=0).to(tl.float32)
    share = tl.sigmoid(gate)
    to_gate = sent * value * share * (1 + gate * (1 - share))
    tl.store(to_gates, to_gate.to(to_rows.dtype.element_ty), mask=inside)
    tl.store(to_gates + width, (sent * gate * share).to(to_rows.dtype.element_ty), mask=inside)
