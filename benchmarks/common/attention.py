"""Causal attention with rotary positions, forward and backward, timed beside a pass without anything else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.rounds import Ratio, in_turn
from megamoe.kernels.attention.core import causal_attention
from megamoe.kernels.attention.rotary import Rotary
from megamoe.kernels.choice import Kernels

ROTARY = Rotary(10000.0)
WARM_UP_ROUNDS = 1


def one_pass(
    shape: tuple[int, int, int, int], plain: bool, dtype: torch.dtype = torch.float32
) -> Callable[..., None]:
    """Forward and backward over heads of one projection, as a model has them.

    shape: length, sequences, heads, columns of a head. plain: PyTorch's operators. The result takes what
    `causal_attention` takes after the rotary positions, but the choice of kernels.
    """
    generator = torch.Generator().manual_seed(0)
    *rows, heads, columns = shape
    mixed = torch.randn(*rows, heads, 3 * columns, generator=generator).to(dtype).requires_grad_()
    sent = torch.randn(*rows, heads * columns, generator=generator).to(dtype)
    kernels = Kernels(compiled=not plain)

    def run(*features: Any) -> None:
        query, key, value = mixed.chunk(3, dim=-1)
        causal_attention(query, key, value, ROTARY, *features, kernels=kernels).backward(sent)
        mixed.grad = None

    return run


def show_ratios(
    run: Callable[..., None],
    cases: dict[str, tuple[Any, ...]],
    rounds: int,
    clock: Callable[[], float],
    bar: float = float("inf"),
) -> bool:
    """Measure a pass with the arguments of each case in turn, and print a line for each.

    The ratios are to the case `causal`. Return whether one is over the bar by its interval's lower end.
    """

    def timed(arguments: tuple[Any, ...], number: int) -> float:
        start = clock()
        run(*arguments)
        return clock() - start

    runs = {name: partial(timed, arguments) for name, arguments in cases.items()}
    times = in_turn(runs, rounds, WARM_UP_ROUNDS)
    print(f"{'':24}{'ms':>9}{'ratio':>8}{'90 % interval':>18}")
    missed = False
    for name, values in times.items():
        ratio = Ratio.of(values, times["causal"])
        over = ratio.low > bar
        missed |= over
        interval = f"{ratio.low:.3f} .. {ratio.high:.3f}"
        median = 1000 * sorted(values)[len(values) // 2]
        print(f"{name:24}{median:9.2f}{ratio.median:8.3f}{interval:>18}{'  over' if over else ''}")
    return missed
