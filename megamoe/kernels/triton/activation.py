"""SwiGLU over rows of gate | value as Triton kernels, with the arguments of `cpu/rows.cpp`."""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.triton.blocks import row_block





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
