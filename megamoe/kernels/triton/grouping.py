"""A stable sort of (token, expert) pairs by expert as Triton kernels, and what is known after it.

It is a counting sort: blocks of pairs count their experts, the counts are added up over blocks, and each
block then knows where its pairs go. Nothing depends on the order in which programs run. Sizes: N pairs, T
tokens, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.costs import each_once
from megamoe.kernels.triton.router_sums import pairs_up_to

NUMBERS = 8192  # of the table [pairs, experts] of one program
MOST_PAIRS = 512  # of a block
BLOCKS = 1024  # whose counts a program adds up at a time
TOKENS = 1024  # of a program


@kernel_operator(
    "group_pairs",
    mutates={"order_N", "place_N", "moved_token_N", "moved_weight_N", "counts_E", "ends_T"},
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
    ends_T: Tensor,
) -> None:
    """Sort pairs by expert, those of one expert in their order.

    order: each row's pair. place: each pair's row. moved_...: the tokens (int64) and weights (fp32) in the
    order of the rows. counts: the pairs of each expert. ends: where each token's pairs end in token_N, which
    ascends.
    """
    if tokens:
        arguments = (token_N, pairs, tokens, pairs.bit_length(), ends_T)
        _ends[(triton.cdiv(tokens, TOKENS),)](*arguments, BLOCK=TOKENS)
    if not pairs:
        counts_E.zero_()
        return
    width = triton.next_power_of_2(experts)
    tall = max(1, min(MOST_PAIRS, NUMBERS // width))
    blocks = triton.cdiv(pairs, tall)
    before_BE = torch.empty(blocks, experts, dtype=torch.int32, device=expert_N.device)
    sizes = {"ROWS": tall, "EXPERTS": width}
    _count[(blocks,)](expert_N, pairs, experts, before_BE, **sizes)
    _add_up[(experts,)](before_BE, blocks, experts, counts_E, BLOCK=BLOCKS)
    given = (expert_N, token_N, weight_N, counts_E, before_BE, pairs, experts)
    _place[(blocks,)](*given, order_N, place_N, moved_token_N, moved_weight_N, **sizes)


@triton.jit
def _ends(token, pairs, tokens, steps, ends, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles BLOCK tokens."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ends + row, pairs_up_to(token, pairs, row, steps), mask=row < tokens)


@triton.jit
def _memberships(expert, pair, pairs, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [pairs, EXPERTS]: 1 for the expert of each pair, int32."""
    own = tl.load(expert + pair, mask=pair < pairs, other=-1)
    return (own[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    expert, pairs, experts, counts, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Each program counts the experts of ROWS pairs."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    count = tl.sum(_memberships(expert, pair, pairs, EXPERTS), axis=0)
    own = counts + tl.program_id(0).to(tl.int64) * experts
    tl.store(own + column, count, mask=column < experts)


@triton.jit
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


@triton.jit
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
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Each program moves ROWS pairs."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    count = tl.load(counts + column, mask=column < experts, other=0).to(tl.int32)
    own = before + tl.program_id(0).to(tl.int64) * experts
    first = tl.cumsum(count, axis=0) - count + tl.load(own + column, mask=column < experts, other=0)
    member = _memberships(expert, pair, pairs, EXPERTS)
    earlier = tl.cumsum(member, axis=0) - member
    row = tl.sum(member * (first[None, :] + earlier), axis=1).to(tl.int64)
    here = pair < pairs
    tl.store(place + pair, row, mask=here)
    tl.store(order + row, pair, mask=here)
    tl.store(moved_token + row, tl.load(token + pair, mask=here, other=0), mask=here)
    tl.store(moved_weight + row, tl.load(weight + pair, mask=here, other=0), mask=here)
