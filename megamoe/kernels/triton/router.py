"""A router's products and small passes as Triton kernels. Sizes: T tokens, E experts, H columns, K choices.

The product reads the tokens in the model's dtype and sums in fp32. Plain forms: `kernels/router.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import (
    VARYING,
    cdiv,
    each_once,
    inside,
    load_block,
    load_transposed,
    next_power_of_2,
    store_block,
    sum_parts,
)
from megamoe.kernels.triton.products import add_product

# The blocks of the scores, of the rows' gradient and of the parts of the weight's gradient: tokens, columns
# and the depth of the sum at a time. `scores` has a column for each expert. Of those tried on an H100
# (docs/scale/gpu.md) the fastest that spill no registers on GPUs of any known capability.
SCORES: dict[str, Any] = {"ROWS": 64, "DEPTH": 32}
TO_ROWS: dict[str, Any] = {"ROWS": 32, "COLUMNS": 64, "DEPTH": 16}
TO_WEIGHT: dict[str, Any] = {"COLUMNS": 128, "DEPTH": 32}
# Three products in TF32 for each in fp32, on tensor cores. On an H100 the scores take a seventh of the time
# of "ieee", and are nearer to those in fp64.
PRECISION = "tf32x3"
MOST_EXPERTS = 64  # of a block
PARTS = 32  # programs that share the sum over all tokens, for each block of the weight's gradient
# Of a block of the weight's gradient. With 64, Triton 3.7 multiplies in TF32 for compute capability 10.0,
# though it was told not to, and spills registers for 9.0.
EXPERTS_OF_A_GRADIENT = 32
TOKENS_OF_A_PASS = 64  # of a program of the passes over rows of few numbers
NUMBERS_OF_A_GRADIENT = 2048  # of the table [tokens, experts] of a program; more spill registers


def _experts_of_a_block(experts: int) -> int:
    return min(MOST_EXPERTS, max(16, next_power_of_2(experts)))


def _flops(rows_TH: Tensor, weight_EH: Tensor, *others: Any, result: None) -> int:
    return 2 * len(rows_TH) * weight_EH.numel()


@kernel_operator("router_scores", mutates={"out_TE"}, bytes_moved=each_once, flops=_flops)
def scores(rows_TH: Tensor, weight_EH: Tensor, tokens: int, experts: int, width: int, out_TE: Tensor) -> None:
    """Compute out = rows weight^T in fp32."""
    if out_TE.numel():
        block = _experts_of_a_block(experts)
        grid = (cdiv(tokens, SCORES["ROWS"]), cdiv(experts, block))
        run_kernel(
            _fp32_product,
            grid,
            rows_TH,
            weight_EH,
            tokens,
            width,
            experts,
            out_TE,
            WEIGHT_IS_OUT_IN=True,
            PRECISION=PRECISION,
            COLUMNS=block,
            **SCORES,
        )


def _bytes_of_backward(sent_TE: Tensor, rows_TH: Tensor, weight_EH: Tensor, *rest: Any, result: None) -> int:
    """The scores' gradient is read twice; the parts of the weight's gradient are written and read."""
    parts = 2 * PARTS * 4 * weight_EH.numel()
    return each_once(sent_TE, sent_TE, rows_TH, weight_EH, *rest, result=result) + parts


@kernel_operator(
    "router_scores_backward",
    mutates={"to_rows_TH", "to_weight_EH"},
    bytes_moved=_bytes_of_backward,
    flops=lambda sent_TE, *others, result: 2 * _flops(*others, result=result),
    launches=3,
)
def scores_backward(
    sent_TE: Tensor,
    rows_TH: Tensor,
    weight_EH: Tensor,
    tokens: int,
    experts: int,
    width: int,
    to_rows_TH: Tensor,
    to_weight_EH: Tensor,
) -> None:
    """Compute the gradients of the rows and of the weight; sums are fp32, each in one order."""
    if not tokens:
        to_weight_EH.zero_()
        return
    grid = (cdiv(tokens, TO_ROWS["ROWS"]), cdiv(width, TO_ROWS["COLUMNS"]))
    arguments = (sent_TE, weight_EH, tokens, experts, width, to_rows_TH)
    run_kernel(_fp32_product, grid, *arguments, WEIGHT_IS_OUT_IN=False, PRECISION=PRECISION, **TO_ROWS)
    block = min(EXPERTS_OF_A_GRADIENT, _experts_of_a_block(experts))
    parts = min(PARTS, cdiv(tokens, TO_WEIGHT["DEPTH"]))
    part_PEH = torch.empty(parts, experts, width, dtype=torch.float32, device=rows_TH.device)
    grid_of_parts = (cdiv(width, TO_WEIGHT["COLUMNS"]), cdiv(experts, block), parts)
    sizes = {"ROWS": block, "PRECISION": PRECISION, **TO_WEIGHT}
    run_kernel(_to_weight, grid_of_parts, sent_TE, rows_TH, tokens, experts, width, part_PEH, **sizes)
    sum_parts(part_PEH, to_weight_EH)


def _bytes_of_weights(probs_TE: Tensor, scores_TE: Tensor | None, *rest: Any, result: None) -> int:
    """The scores are read in rows of small sums alone."""
    return each_once(probs_TE, *rest, result=result)


@kernel_operator("chosen_weights", mutates={"out_TK"}, bytes_moved=_bytes_of_weights)
def chosen_weights(
    probs_TE: Tensor,
    scores_TE: Tensor | None,
    expert_TK: Tensor,
    tokens: int,
    experts: int,
    choices: int,
    smallest: float,
    small: float,
    slope: float,
    scale: float,
    out_TK: Tensor,
) -> None:
    """Compute out = scale * p / max(the sum of the chosen p, smallest), for the chosen p.

    With scores, where that sum is below `small`: scale * the softmax of slope * the chosen scores.
    """
    if out_TK.numel():
        sizes = {"ROWS": TOKENS_OF_A_PASS, "CHOICES": next_power_of_2(choices)}
        grid = (cdiv(tokens, TOKENS_OF_A_PASS),)
        numbers = (tokens, experts, choices, smallest, small, slope, scale)
        arguments = (probs_TE, scores_TE, expert_TK, *numbers, out_TK)
        run_kernel(_chosen_weights, grid, *arguments, **sizes)


def _bytes_of_weights_backward(
    sent_TK: Tensor, probs_TE: Tensor, scores_TE: Tensor | None, *rest: Any, result: None
) -> int:
    return each_once(sent_TK, probs_TE, *rest, result=result)


@kernel_operator(
    "chosen_weights_backward", mutates={"to_probs_TE", "to_scores_TE"}, bytes_moved=_bytes_of_weights_backward
)
def chosen_weights_backward(
    sent_TK: Tensor,
    probs_TE: Tensor,
    scores_TE: Tensor | None,
    expert_TK: Tensor,
    tokens: int,
    experts: int,
    choices: int,
    smallest: float,
    small: float,
    slope: float,
    scale: float,
    to_probs_TE: Tensor,
    to_scores_TE: Tensor | None,
) -> None:
    """Compute the gradients of p and of the scores, 0 for experts that were not chosen."""
    if to_probs_TE.numel():
        width = next_power_of_2(experts)
        block = max(1, min(TOKENS_OF_A_PASS, NUMBERS_OF_A_GRADIENT // width))
        sizes = {"ROWS": block, "EXPERTS": width, "CHOICES": choices}
        grid = (cdiv(tokens, block),)
        numbers = (tokens, experts, smallest, small, slope, scale)
        arguments = (sent_TK, probs_TE, scores_TE, expert_TK, *numbers, to_probs_TE, to_scores_TE)
        run_kernel(_chosen_weights_backward, grid, *arguments, **sizes)


@triton.jit(do_not_specialize=VARYING)
def _fp32_product(  # type: ignore[no-untyped-def]
    rows,
    weight,
    tokens,
    inner,
    outer,
    out,
    WEIGHT_IS_OUT_IN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes ROWS x COLUMNS of the rows times a weight [outer, inner] or [inner, outer]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in range(0, inner, DEPTH):
        sum = add_product(
            sum, rows, row, tokens, weight, column, outer, depth, inner, WEIGHT_IS_OUT_IN, PRECISION, DEPTH
        )
    store_block(out, row, column, tokens, outer, sum)


@triton.jit(do_not_specialize=VARYING)
def _to_weight(  # type: ignore[no-untyped-def]
    sent,
    rows,
    tokens,
    experts,
    width,
    part,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program adds up every so-many-th block of DEPTH tokens, for ROWS experts and COLUMNS columns."""
    expert = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(2) * DEPTH, tokens, tl.num_programs(2) * DEPTH):
        token = tl.cast(first, tl.int64) + tl.arange(0, DEPTH)
        left = load_transposed(sent, token, expert, tokens, experts)
        right = load_block(rows, token, column, tokens, width).to(tl.float32)
        sum = tl.dot(left, right, sum, input_precision=PRECISION)
    own = part + tl.program_id(2).to(tl.int64) * experts * width
    store_block(own, expert, column, experts, width, sum)


@triton.jit(do_not_specialize=VARYING)
def _chosen_weights(  # type: ignore[no-untyped-def]
    probs,
    scores,
    expert,
    tokens,
    experts,
    choices,
    smallest,
    small,
    slope,
    scale,
    out,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Each program handles ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    choice = tl.arange(0, CHOICES)
    chosen = load_block(expert, row, choice, tokens, choices)
    here = inside(row, choice, tokens, choices)
    prob = tl.load(probs + (row[:, None] * experts + chosen), mask=here, other=0)
    total = tl.sum(prob, axis=1)
    share = prob / tl.maximum(total, smallest)[:, None]
    if scores is not None:
        is_small = here & (total < small)[:, None]
        score = tl.load(scores + (row[:, None] * experts + chosen), mask=is_small, other=0)
        share = tl.where(is_small, _softmax(score * slope, is_small), share)
    store_block(out, row, choice, tokens, choices, share * scale)


@triton.jit
def _softmax(logits, here):  # type: ignore[no-untyped-def]
    """Return the softmax of the entries of each row that are `here`, and 0 elsewhere."""
    largest = tl.max(tl.where(here, logits, float("-inf")), axis=1)
    power = tl.where(here, tl.exp(logits - largest[:, None]), 0.0)
    return power / tl.maximum(tl.sum(power, axis=1), 1e-30)[:, None]


@triton.jit(do_not_specialize=VARYING)
def _chosen_weights_backward(  # type: ignore[no-untyped-def]
    sent,
    probs,
    scores,
    expert,
    tokens,
    experts,
    smallest,
    small,
    slope,
    scale,
    to_probs,
    to_scores,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Each program handles ROWS tokens; with scores, the p of a sum below `small` have no gradient."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    total = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS], tl.float32)
    received = tl.zeros([ROWS, EXPERTS], tl.float32)
    is_chosen = tl.zeros([ROWS, EXPERTS], tl.int32)
    for choice in tl.static_range(CHOICES):
        chosen = tl.load(expert + row * CHOICES + choice, mask=row < tokens, other=0)
        prob = tl.load(probs + row * experts + chosen, mask=row < tokens, other=0)
        gradient = tl.load(sent + row * CHOICES + choice, mask=row < tokens, other=0) * scale
        total += prob
        product += prob * gradient
        here = column[None, :] == chosen[:, None]
        received = tl.where(here, received + gradient[:, None], received)
        is_chosen = tl.where(here, 1, is_chosen)
    bound = tl.maximum(total, smallest)
    share = tl.where(total >= smallest, product / (bound * bound), 0.0)
    result = tl.where(is_chosen == 1, received / bound[:, None] - share[:, None], 0.0)
    if scores is not None:
        is_small = (is_chosen == 1) & (total < small)[:, None] & (row < tokens)[:, None]
        score = tl.load(scores + row[:, None] * experts + column[None, :], mask=is_small, other=0)
        weight = _softmax(score * slope, is_small)
        change = received - tl.sum(weight * received, axis=1)[:, None]
        store_block(to_scores, row, column, tokens, experts, tl.where(is_small, slope * weight * change, 0.0))
        result = tl.where(is_small, 0.0, result)
    store_block(to_probs, row, column, tokens, experts, result)


NUMBERS = 4096  # of a block of `top_k`
NAN_ORDER, TAKEN = tl.constexpr(0x7FFFFFFF), tl.constexpr(-0x80000000)


@kernel_operator("top_k", mutates={"chosen_TK"}, bytes_moved=each_once)
def top_k(ranking_TE: Tensor, tokens: int, experts: int, count: int, chosen_TK: Tensor) -> None:
    """Write the indices of each row's `count` largest values, the largest first; NaN counts as the largest.

    Among equal values the first is taken. ranking: fp32. chosen: int64.
    """
    if chosen_TK.numel():
        width = next_power_of_2(experts)
        rows = min(TOKENS_OF_A_PASS, max(1, NUMBERS // width))
        arguments = (ranking_TE, tokens, experts, chosen_TK)
        run_kernel(_top_k, (cdiv(tokens, rows),), *arguments, COUNT=count, ROWS=rows, EXPERTS=width)


@triton.jit(do_not_specialize=VARYING)
def _top_k(  # type: ignore[no-untyped-def]
    ranking, tokens, experts, chosen, COUNT: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Each program chooses for ROWS tokens, by whole numbers in the order of the floats."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    here = (row < tokens)[:, None] & (column < experts)[None, :]
    value = tl.load(ranking + row[:, None] * experts + column[None, :], mask=here, other=0)
    value = tl.where(value == 0, 0.0, value)  # -0.0 too
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(value != value, NAN_ORDER, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    order = tl.where(here, order, TAKEN)
    for place in tl.static_range(COUNT):
        largest = tl.max(order, axis=1)
        index = tl.min(tl.where(order == largest[:, None], column[None, :], EXPERTS), axis=1)
        tl.store(chosen + row * COUNT + place, index.to(tl.int64), mask=row < tokens)
        order = tl.where(column[None, :] == index[:, None], TAKEN, order)
