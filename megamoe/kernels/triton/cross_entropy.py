"""The passes of `kernels/cross_entropy.py` over the logits as Triton kernels."""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import (
    bytes_of,
    cdiv,
    each_once,
    next_power_of_2,
)

BLOCK = 4096  # words that one program holds at a time
WARPS = 8


@kernel_operator(
    "cross_entropy", mutates={"largest_T", "sum_T", "label_logit_T", "total_T"}, bytes_moved=each_once
)
def statistics(
    logits_TV: Tensor,
    label_T: Tensor,
    tokens: int,
    words: int,
    largest_T: Tensor,
    sum_T: Tensor,
    label_logit_T: Tensor,
    total_T: Tensor,
) -> None:
    """Compute each token's largest logit, sum of exp(logit - largest), logit of the label (0 if the label is
    not among these words), and sum of logits, in one pass."""
    if tokens:
        results = (largest_T, sum_T, label_logit_T, total_T)
        block = min(BLOCK, next_power_of_2(words))
        run_kernel(_statistics, (tokens,), logits_TV, label_T, words, *results, BLOCK=block, num_warps=WARPS)


@kernel_operator(
    "cross_entropy_backward",
    mutates={"logits_TV"},
    bytes_moved=lambda logits_TV, *rest, result: bytes_of(logits_TV, logits_TV),
)
def gradient(
    logits_TV: Tensor,
    label_T: Tensor,
    largest_T: Tensor,
    scale_T: Tensor,
    sent_T: Tensor,
    tokens: int,
    words: int,
    of_label: float,
    of_all: float,
) -> None:
    """Write sent * (exp(logit - largest) * scale - of_label * [is the label] - of_all) over the logits."""
    if tokens and words:
        block = min(BLOCK, next_power_of_2(words))
        arguments = (logits_TV, label_T, largest_T, scale_T, sent_T, words, of_label, of_all)
        run_kernel(_gradient, (tokens, cdiv(words, block)), *arguments, BLOCK=block, num_warps=WARPS)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, label, words, largest, sums, label_logits, totals, BLOCK: tl.constexpr
):
    """Each program handles one token, BLOCK words at a time; sums are scaled again if a larger one comes."""
    token = tl.program_id(0).to(tl.int64)
    own = logits + token * words
    peak = tl.full([], float("-inf"), tl.float32)
    sum = tl.zeros([], tl.float32)
    total = tl.zeros([], tl.float32)
    for left in range(0, words, BLOCK):
        word = left + tl.arange(0, BLOCK)
        inside = word < words
        logit = tl.load(own + word, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(peak, tl.max(logit, axis=0))
        shift = tl.where(above == float("-inf"), 0.0, above)  # all of them may be -inf
        sum = sum * tl.exp(peak - shift) + tl.sum(tl.exp(logit - shift), axis=0)
        total += tl.sum(tl.where(inside, logit, 0.0), axis=0)
        peak = above
    here = tl.load(label + token)
    known = (here >= 0) & (here < words)
    tl.store(label_logits + token, tl.load(own + here, mask=known, other=0).to(tl.float32))
    tl.store(largest + token, peak)
    tl.store(sums + token, sum)
    tl.store(totals + token, total)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, label, largest, scale, sent, words, of_label, of_all, BLOCK: tl.constexpr
):
    """Each program handles BLOCK words of one token."""
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    place = token * words + word
    logit = tl.load(logits + place, mask=inside, other=0).to(tl.float32)
    change = tl.exp(logit - tl.load(largest + token)) * tl.load(scale + token) - of_all
    change = tl.where(word == tl.load(label + token), change - of_label, change)
    change *= tl.load(sent + token)
    tl.store(logits + place, change.to(logits.dtype.element_ty), mask=inside)
