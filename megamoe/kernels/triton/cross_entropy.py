"""The passes of `kernels/cross_entropy.py` over the logits as Triton kernels."""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import bytes_of, cdiv, each_once, next_power_of_2

BLOCK = 4096  # logits that one program holds at a time
WARPS = 8


@kernel_operator(
    "cross_entropy", mutates={"largest_T", "sum_T", "label_logit_T", "total_T"}, bytes_moved=each_once
)
def statistics(
    logits_TV: Tensor,
    label_T: Tensor,
    tokens: int,
    shard_size: int,
    largest_T: Tensor,
    sum_T: Tensor,
    label_logit_T: Tensor,
    total_T: Tensor,
) -> None:
    """Compute each token's largest logit, sum of exp(logit - largest), logit of the label (0 if the label is
    not among this rank's logits), and sum of logits, in one pass."""
    if tokens:
        results = (largest_T, sum_T, label_logit_T, total_T)
        block = min(BLOCK, next_power_of_2(shard_size))
        run_kernel(
            _statistics, (tokens,), logits_TV, label_T, shard_size, *results, BLOCK=block, num_warps=WARPS
        )


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
    shard_size: int,
    of_label: float,
    of_all: float,
) -> None:
    """Write sent * (exp(logit - largest) * scale - of_label * [is the label] - of_all) over the logits."""
    if tokens and shard_size:
        block = min(BLOCK, next_power_of_2(shard_size))
        arguments = (logits_TV, label_T, largest_T, scale_T, sent_T, shard_size, of_label, of_all)
        run_kernel(_gradient, (tokens, cdiv(shard_size, block)), *arguments, BLOCK=block, num_warps=WARPS)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, label, shard_size, largest, sums, label_logits, totals, BLOCK: tl.constexpr
):
    """Each program handles one token, BLOCK logits at a time; sums are scaled again if a larger one comes."""
    token = tl.program_id(0).to(tl.int64)
    own = logits + token * shard_size
    peak = tl.full([], float("-inf"), tl.float32)
    sum = tl.zeros([], tl.float32)
    total = tl.zeros([], tl.float32)
    for left in range(0, shard_size, BLOCK):
        entry = left + tl.arange(0, BLOCK)
        inside = entry < shard_size
        logit = tl.load(own + entry, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(peak, tl.max(logit, axis=0))
        shift = tl.where(above == float("-inf"), 0.0, above)  # all of them may be -inf
        sum = sum * tl.exp(peak - shift) + tl.sum(tl.exp(logit - shift), axis=0)
        total += tl.sum(tl.where(inside, logit, 0.0), axis=0)
        peak = above
    here = tl.load(label + token)
    known = (here >= 0) & (here < shard_size)
    tl.store(label_logits + token, tl.load(own + here, mask=known, other=0).to(tl.float32))
    tl.store(largest + token, peak)
    tl.store(sums + token, sum)
    tl.store(totals + token, total)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, label, largest, scale, sent, shard_size, of_label, of_all, BLOCK: tl.constexpr
):
    """Each program handles BLOCK logits of one token."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < shard_size
    place = token * shard_size + entry
    logit = tl.load(logits + place, mask=inside, other=0).to(tl.float32)
    change = tl.exp(logit - tl.load(largest + token)) * tl.load(scale + token) - of_all
    change = tl.where(entry == tl.load(label + token), change - of_label, change)
    change *= tl.load(sent + token)
    tl.store(logits + place, change.to(logits.dtype.element_ty), mask=inside)
