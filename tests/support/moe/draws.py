"""Random draws: each follows from seed, step, layer and token, never from a token's place or rank."""

from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from tests.support.moe.build import make_context

TOKENS = 64
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def rows_of(context: StepContext) -> int:
    """Return the number of tokens of a context: those that it numbers, otherwise TOKENS."""
    return TOKENS if context.batch.token_index_T is None else len(context.batch.token_index_T)


def check_keys(drawn: Callable[[StepContext, int], Tensor], least: float = 0.3) -> None:
    """See that the draws of a training step follow their key.

    drawn: from a context and a layer to a row for each token (`rows_of`). least: the least share of entries
    that another key changes.
    """
    index_T = torch.arange(TOKENS)
    first = drawn(StepContext(1, 4), 1)
    torch.manual_seed(9)
    assert torch.equal(drawn(make_context(1, 4, token_index_T=index_T), 1), first)
    order_T = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn(make_context(1, 4, token_index_T=order_T), 1), first[order_T])
    ranks = [drawn(make_context(1, 4, token_index_T=part_T), 1) for part_T in index_T.split(16)]
    assert torch.equal(torch.cat(ranks), first)
    rollout_T = index_T + (1 << 48)
    others = [StepContext(2, 4), StepContext(1, 5), make_context(1, 4, token_index_T=rollout_T)]
    for other in (*(drawn(context, 1) for context in others), drawn(StepContext(1, 4), 2)):
        assert (other != first).float().mean() > least


def mix(z: int) -> int:
    """SplitMix64's finaliser."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def unit(draw_key: int, token: int, column: int) -> float:
    """Return a number in [0, 1) with 24 bits."""
    state = mix((token * GOLDEN + draw_key) & MASK)
    return (mix((state + (column + 1) * GOLDEN) & MASK) >> 40) / 2**24
