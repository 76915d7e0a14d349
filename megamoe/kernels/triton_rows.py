"""The passes of `rows.py` as Triton kernels for CUDA, with the arguments of `cpu/rows.cpp`.

Rows are fp32, bf16 or fp16; sums are fp32, each in one order, without atomics. Sizes: T tokens, N (token,
expert) pairs, H columns, F FFN columns. Offsets of rows are computed in 64 bits, because N x H may exceed
2^31.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 1024  # columns that one program holds at a time


class TritonKernels:
    """The kernels for CUDA.

    On the CPU they run in Triton's interpreter (TRITON_INTERPRET=1 before its import).
    """

    dtypes = frozenset([torch.float32, torch.bfloat16, torch.float16])

    def rows_by_token(self, token_N: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return (the rows ordered by token [N], where the rows of each token end [T]), int64.

        It neither waits for the device nor checks the tokens: `gather` asserts on the device that they are
        valid.
        """
        sorted_N, row_N = torch.sort(token_N, stable=True)
        token_T = torch.arange(num_tokens, device=token_N.device, dtype=token_N.dtype)
        return row_N, torch.searchsorted(sorted_N, token_T, right=True)

    def call(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        """Launch the pass of that name. Its tensors are contiguous, on one device and of that dtype."""
        LAUNCHERS[name](*arguments)


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
    block = _block(width)
    _combine[(tokens, triton.cdiv(width, block))](rows_NH, row_N, ends_T, weight_N, width, out, BLOCK=block)


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
        _combine_backward[(count,)](*arguments, BLOCK=_block(width))


def swiglu(rows_N2F: Tensor, count: int, width: int, out_NF: Tensor) -> None:
    """Compute gate * sigmoid(gate) * value: [N, 2F] of gate | value to [N, F]."""
    if out_NF.numel():
        block = _block(width)
        _swiglu[(count, triton.cdiv(width, block))](rows_N2F, width, out_NF, BLOCK=block)


def swiglu_backward(
    gradient_NF: Tensor, rows_N2F: Tensor, count: int, width: int, to_rows_N2F: Tensor
) -> None:
    """Compute the gradients of both halves: [N, 2F]."""
    if gradient_NF.numel():
        block = _block(width)
        grid = (count, triton.cdiv(width, block))
        _swiglu_backward[grid](gradient_NF, rows_N2F, width, to_rows_N2F, BLOCK=block)


LAUNCHERS: dict[str, Callable[..., None]] = {
    "combine": combine,
    "combine_backward": combine_backward,
    "swiglu": swiglu,
    "swiglu_backward": swiglu_backward,
}


def _block(width: int) -> int:
    return min(LARGEST_BLOCK, triton.next_power_of_2(max(width, 1)))


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
