"""Adds up the partial sums that the programs of a kernel write."""

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128  # of a program
PARTS = 16  # that it adds at a time


def sum_parts(part_PX: Tensor, out_X: Tensor) -> None:
    """Write the sum over the first dimension, fp32, in one order, into `out_X` in its dtype."""
    columns = out_X.numel()
    arguments = (part_PX, len(part_PX), columns, out_X)
    _sum_parts[(triton.cdiv(columns, COLUMNS),)](*arguments, ROWS=PARTS, BLOCK=COLUMNS)


@triton.jit
def _sum_parts(part, parts, columns, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program adds up BLOCK columns."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        inside = (row < parts)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        sum += tl.sum(tl.load(part + place, mask=inside, other=0), axis=0)
    tl.store(out + column, sum.to(out.dtype.element_ty), mask=column < columns)
