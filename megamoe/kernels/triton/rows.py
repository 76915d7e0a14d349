"""Grouping and combination of rows as Triton kernels, with the arguments of `cpu/rows.cpp`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import VARYING, cdiv, each_once, next_power_of_2, row_block
from megamoe.kernels.triton.router_sums import pairs_up_to


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
    run_kernel(
        _combine, (tokens, cdiv(width, block)), rows_NH, row_N, ends_T, weight_N, width, out, BLOCK=block
    )


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
        run_kernel(_combine_backward, (count,), *arguments, BLOCK=row_block(width))


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


NUMBERS = 8192  # of the table [pairs, experts] of one program
MOST_PAIRS = 512  # of a block
BLOCKS = 1024  # whose counts a program adds up at a time
TOKENS = 1024  # of a program


@kernel_operator(
    "group_pairs",
    mutates={"order_N", "place_N", "moved_token_N", "moved_weight_N", "counts_E", "ends_E", "ends_T"},
    bytes_moved=each_once,
    launches=4,
)
def group_pairs(
    expert_N: Tensor,
    token_N: Tensor,
    weight_N: Tensor,
    pairs: int,
    experts: int,
    tokens: int,
    order_N: Tensor,
    place_N: Tensor,
    moved_token_N: Tensor,
    moved_weight_N: Tensor,
    counts_E: Tensor,
    ends_E: Tensor,
    ends_T: Tensor,
) -> None:
    """Sort pairs by expert, those of one expert in their order.

    order: each row's pair. place: each pair's row. moved_...: the tokens (int64) and weights (fp32) in the
    order of the rows. counts: the pairs of each expert. ends_E: where its rows end. ends_T: where each
    token's pairs end in token_N, which ascends.
    """
    if tokens:
        arguments = (token_N, pairs, tokens, pairs.bit_length(), ends_T)
        run_kernel(_ends, (cdiv(tokens, TOKENS),), *arguments, BLOCK=TOKENS)
    if not pairs:
        counts_E.zero_()
        ends_E.zero_()
        return
    width = next_power_of_2(experts)
    tall = max(1, min(MOST_PAIRS, NUMBERS // width))
    blocks = cdiv(pairs, tall)
    before_BE = torch.empty(blocks, experts, dtype=torch.int32, device=expert_N.device)
    sizes = {"ROWS": tall, "EXPERTS": width}
    run_kernel(_count, (blocks,), expert_N, pairs, experts, before_BE, **sizes)
    run_kernel(_add_up, (experts,), before_BE, blocks, experts, counts_E, BLOCK=BLOCKS)
    given = (expert_N, token_N, weight_N, counts_E, before_BE, pairs, experts)
    made = (order_N, place_N, moved_token_N, moved_weight_N, ends_E)
    run_kernel(_place, (blocks,), *given, *made, **sizes)


@triton.jit(do_not_specialize=VARYING)
def _ends(token, pairs, tokens, steps, ends, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles BLOCK tokens."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ends + row, pairs_up_to(token, pairs, row, steps), mask=row < tokens)


@triton.jit
def _memberships(expert, pair, pairs, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [pairs, EXPERTS]: 1 for the expert of each pair, int32."""
    own = tl.load(expert + pair, mask=pair < pairs, other=-1)
    return (own[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=VARYING)
def _count(  # type: ignore[no-untyped-def]
    expert, pairs, experts, counts, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Each program counts the experts of ROWS pairs."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    count = tl.sum(_memberships(expert, pair, pairs, EXPERTS), axis=0)
    own = counts + tl.program_id(0).to(tl.int64) * experts
    tl.store(own + column, count, mask=column < experts)


@triton.jit(do_not_specialize=VARYING)
def _add_up(counts, blocks, experts, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program replaces one expert's counts by their sum over the blocks before."""
    column = counts + tl.program_id(0)
    sum = tl.zeros([], tl.int32)
    for first in range(0, blocks, BLOCK):
        block = tl.cast(first, tl.int64) + tl.arange(0, BLOCK)
        count = tl.load(column + block * experts, mask=block < blocks, other=0)
        tl.store(column + block * experts, sum + tl.cumsum(count, axis=0) - count, mask=block < blocks)
        sum += tl.sum(count, axis=0)
    tl.store(total + tl.program_id(0), sum.to(tl.int64))


@triton.jit(do_not_specialize=VARYING)
def _place(  # type: ignore[no-untyped-def]
    expert,
    token,
    weight,
    counts,
    before,
    pairs,
    experts,
    order,
    place,
    moved_token,
    moved_weight,
    ends,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Each program moves ROWS pairs; the first one writes where the experts' rows end."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    count = tl.load(counts + column, mask=column < experts, other=0).to(tl.int32)
    own = before + tl.program_id(0).to(tl.int64) * experts
    end = tl.cumsum(count, axis=0)
    if tl.program_id(0) == 0:
        tl.store(ends + column, end.to(tl.int64), mask=column < experts)
    first = end - count + tl.load(own + column, mask=column < experts, other=0)
    member = _memberships(expert, pair, pairs, EXPERTS)
    earlier = tl.cumsum(member, axis=0) - member
    row = tl.sum(member * (first[None, :] + earlier), axis=1).to(tl.int64)
    here = pair < pairs
    tl.store(place + pair, row, mask=here)
    tl.store(order + row, pair, mask=here)
    tl.store(moved_token + row, tl.load(token + pair, mask=here, other=0), mask=here)
    tl.store(moved_weight + row, tl.load(weight + pair, mask=here, other=0), mask=here)
