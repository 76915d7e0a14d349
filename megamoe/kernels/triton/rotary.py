"""Rotary positions as a Triton kernel, with the arguments of `cpu/block.cpp`."""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.costs import each_once

NUMBERS = 2048  # pairs that one program rotates at most


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
    turn: float,
) -> None:
    """Rotate the halves of each head by their position's angles times `turn`, 1 or -1.

    from_s, from_b, from_n: strides of `heads` over positions, sequences and heads; to_...: those of `out`.
    half: columns of half a head.
    """
    if not out.numel():
        return
    block = triton.next_power_of_2(half)
    tall = min(triton.next_power_of_2(count), max(1, NUMBERS // block))
    grid = (length * batch, triton.cdiv(count, tall))
    strides = (from_s, from_b, from_n, to_s, to_b, to_n)
    arguments = (heads, out, cosine_SD, sine_SD, *strides, batch, count, half, turn)
    _rotate[grid](*arguments, HEADS=tall, BLOCK=block)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    heads,
    out,
    cosine,
    sine,
    from_s,
    from_b,
    from_n,
    to_s,
    to_b,
    to_n,
    batch,
    count,
    half,
    turn,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one position of one sequence, HEADS heads."""
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    n = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (n < count)[:, None] & (column < half)[None, :]
    angle = s * half + column
    cos = tl.load(cosine + angle, mask=column < half, other=0)[None, :]
    sin = tl.load(sine + angle, mask=column < half, other=0)[None, :] * turn
    place = heads + s * from_s + b * from_b + n[:, None] * from_n + column[None, :]
    first = tl.load(place, mask=inside, other=0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0).to(tl.float32)
    place = out + s * to_s + b * to_b + n[:, None] * to_n + column[None, :]
    tl.store(place, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)
