"""Sums over a router's numbers as Triton kernels: auxiliary losses and what is observed of the gate.

Each is one operator of two or three launches in place of about ten, which would each be shorter than the
time to launch them. Programs write partial sums, which are added in one order. Plain forms:
`kernels/router.py`. Sizes: T tokens, E experts, N (token, expert) pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import VARYING, cdiv, each_once, load_block, next_power_of_2, store_block

TOKENS = 32  # of a block
PROGRAMS = 256
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


def _options(experts: int) -> dict[str, int]:
    block = next_power_of_2(experts)
    return {"ROWS": TOKENS, "EXPERTS": block, "num_warps": 4 if block <= 128 else 8}


def _programs(tokens: int) -> int:
    return min(PROGRAMS, cdiv(tokens, TOKENS))


@kernel_operator("z_loss", mutates={"log_sum_T", "out"}, bytes_moved=each_once, launches=2)
def z_loss(scores_TE: Tensor, tokens: int, experts: int, log_sum_T: Tensor, out: Tensor) -> None:
    """Compute log_sum = logsumexp of each token's scores, out = the mean of its square."""
    if not scores_TE.numel():
        out.zero_()
        return
    part_P = out.new_empty(_programs(tokens))
    run_kernel(_z_loss, (len(part_P),), scores_TE, tokens, experts, log_sum_T, part_P, **_options(experts))
    torch.sum(part_P, dim=0, out=out)


@kernel_operator("z_loss_backward", mutates={"to_scores_TE"}, bytes_moved=each_once)
def z_loss_backward(
    sent: Tensor, scores_TE: Tensor, log_sum_T: Tensor, tokens: int, experts: int, to_scores_TE: Tensor
) -> None:
    """Compute sent * 2 / T * log_sum * softmax(scores)."""
    if scores_TE.numel():
        arguments = (sent, scores_TE, log_sum_T, tokens, experts, to_scores_TE)
        run_kernel(_z_loss_backward, (cdiv(tokens, TOKENS),), *arguments, **_options(experts))


@kernel_operator("balance_loss", mutates={"factor_E", "out"}, bytes_moved=each_once, launches=2)
def balance_loss(
    probs_TE: Tensor, counts_E: Tensor, tokens: int, experts: int, factor_E: Tensor, out: Tensor
) -> None:
    """Compute factor = E / T * counts / max(the sum of counts, 1), out = the sum of factor * probs."""
    if not probs_TE.numel():
        factor_E.zero_()
        out.zero_()
        return
    part_P = out.new_empty(_programs(tokens))
    arguments = (probs_TE, counts_E, tokens, experts, factor_E, part_P)
    run_kernel(_balance_loss, (len(part_P),), *arguments, **_options(experts))
    torch.sum(part_P, dim=0, out=out)


@kernel_operator("gate_sums", mutates={"sums_2", "width_D"}, bytes_moved=each_once, launches=3)
def gate_sums(
    probs_TE: Tensor, token_N: Tensor, tokens: int, experts: int, pairs: int, sums_2: Tensor, width_D: Tensor
) -> None:
    """Compute the sums over tokens of the entropy and of the largest share, and how many tokens have each
    number of pairs, at most E. token_N: int64, ascending. sums_2: fp32. width_D: int64 [E + 1].
    """
    if not probs_TE.numel():
        sums_2.zero_()
        width_D.zero_()
        return
    programs = _programs(tokens)
    part_P2 = sums_2.new_empty(programs, 2)
    part_PD = torch.empty(programs, experts + 1, dtype=torch.int32, device=sums_2.device)
    arguments = (probs_TE, token_N, tokens, experts, pairs, pairs.bit_length(), part_P2, part_PD)
    run_kernel(_gate_sums, (programs,), *arguments, **_options(experts), BINS=next_power_of_2(experts + 1))
    torch.sum(part_P2, dim=0, out=sums_2)
    torch.sum(part_PD, dim=0, out=width_D)


@triton.jit
def pairs_up_to(token, pairs, last, steps):  # type: ignore[no-untyped-def]
    """Return how many of the ascending tokens are at most `last`, by bisection in so many steps."""
    low = tl.zeros_like(last)
    high = low + pairs
    for _ in range(steps):
        open = low < high
        middle = (low + high) // 2
        right = open & (tl.load(token + middle, mask=open, other=0) <= last)
        low = tl.where(right, middle + 1, low)
        high = tl.where(open & (right == 0), middle, high)
    return low


@triton.jit(do_not_specialize=VARYING)
def _z_loss(  # type: ignore[no-untyped-def]
    scores, tokens, experts, log_sum, part, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Each program adds up every PROGRAMS-th block of ROWS tokens."""
    expert = tl.arange(0, EXPERTS)
    squares = tl.zeros([ROWS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        score = load_block(scores, row, expert, tokens, experts)
        score = tl.where((expert < experts)[None, :], score, float("-inf"))
        largest = tl.max(score, axis=1)
        total = tl.sum(tl.exp(score - largest[:, None]), axis=1)
        result = tl.log(total) + largest
        tl.store(log_sum + row, result, mask=row < tokens)
        squares += tl.where(row < tokens, result * result, 0.0)
    tl.store(part + tl.program_id(0), tl.sum(squares, axis=0) / tokens)


@triton.jit(do_not_specialize=VARYING)
def _z_loss_backward(  # type: ignore[no-untyped-def]
    sent, scores, log_sum, tokens, experts, to_scores, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Each program handles ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    score = load_block(scores, row, expert, tokens, experts)
    log = tl.load(log_sum + row, mask=row < tokens, other=0)
    factor = log * (2 * tl.load(sent) / tokens)
    change = tl.exp(score - log[:, None]) * factor[:, None]
    store_block(to_scores, row, expert, tokens, experts, change)


@triton.jit(do_not_specialize=VARYING)
def _balance_loss(  # type: ignore[no-untyped-def]
    probs, counts, tokens, experts, factor, part, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Each program adds up every PROGRAMS-th block of ROWS tokens; the first one writes the factor."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    whole = tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    own = count.to(tl.float32) / whole * (experts / tl.cast(tokens, tl.float32))
    sum = tl.zeros([EXPERTS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        sum += tl.sum(load_block(probs, row, expert, tokens, experts), axis=0)
    tl.store(part + tl.program_id(0), tl.sum(sum * own, axis=0))
    if tl.program_id(0) == 0:
        tl.store(factor + expert, own, mask=expert < experts)


@triton.jit(do_not_specialize=VARYING)
def _gate_sums(  # type: ignore[no-untyped-def]
    probs,
    token,
    tokens,
    experts,
    pairs,
    steps,
    part,
    part_of_width,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Each program adds up every PROGRAMS-th block of ROWS tokens."""
    expert = tl.arange(0, EXPERTS)
    entropies = tl.zeros([ROWS], tl.float32)
    largest = tl.zeros([ROWS], tl.float32)
    widths = tl.zeros([BINS], tl.int32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        here = row < tokens
        prob = load_block(probs, row, expert, tokens, experts)
        total = tl.sum(prob, axis=1)
        total = tl.where(total < SMALLEST, SMALLEST, total)  # NaN stays
        of_expert = tl.where(prob == 0, 0.0, -prob * tl.log(prob))
        entropies += tl.where(here, tl.log(total) + tl.sum(of_expert, axis=1) / total, 0.0)
        largest += tl.where(here, tl.max(prob, axis=1) / total, 0.0)
        width = pairs_up_to(token, pairs, row, steps) - pairs_up_to(token, pairs, row - 1, steps)
        widths += tl.histogram(tl.minimum(width, experts).to(tl.int32), BINS, mask=here)
    number = tl.program_id(0)
    tl.store(part + 2 * number, tl.sum(entropies, axis=0))
    tl.store(part + 2 * number + 1, tl.sum(largest, axis=0))
    bin = tl.arange(0, BINS)
    tl.store(part_of_width + number * (experts + 1) + bin, widths, mask=bin <= experts)
