"""What windows, sinks and soft caps cost in attention: processor time beside plain causal attention.

    python benchmarks/attention_variants.py [--length 2048] [--heads 8] [--columns 64] [--window 128]
                                            [--plain] [--rounds 9]

Measured is causal attention with rotary positions over one sequence, forward and backward, in fp32 on the
CPU. Each variant and attention without any are measured in turn, in one process; printed are medians of the
rounds' processor time of all threads, and of its ratio to the causal pass with the 90 % interval.

--plain: PyTorch's operators, not the compiled kernels.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.command import parser_of, positive
from common.machine import cpu_model, settle_process
from common.rounds import Ratio, in_turn
from megamoe.kernels.attention.core import causal_attention
from megamoe.kernels.attention.rotary import Rotary
from megamoe.kernels.attention.variants import PLAIN, Variant
from megamoe.kernels.choice import Kernels

ROTARY = Rotary(10000.0)
WARM_UP_ROUNDS = 1


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=positive, default=2048)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--columns", type=positive, default=64)
    parser.add_argument("--window", type=positive, default=128)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--rounds", type=positive, default=9)
    arguments = parser.parse_args()
    settle_process()
    print(f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{arguments.length} tokens, {arguments.heads} heads of {arguments.columns}, fp32, ", end="")
    print("plain" if arguments.plain else "compiled where there are kernels")
    report(arguments)


def variants_of(arguments: Any) -> dict[str, Variant]:
    """Return what is measured, by name."""
    sinks = torch.zeros(arguments.heads, requires_grad=True)
    return {
        "causal": PLAIN,
        "window": Variant(window=arguments.window),
        "sinks": Variant(sinks_N=sinks),
        "window and sinks": Variant(window=arguments.window, sinks_N=sinks),
        "soft cap": Variant(soft_cap=50.0),
        "soft cap and window": Variant(window=arguments.window, soft_cap=50.0),
    }


def one_pass(arguments: Any) -> Callable[[Variant], None]:
    """Forward and backward over heads of one projection, as a model has them."""
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.length, 1, arguments.heads, 3 * arguments.columns)
    mixed = torch.randn(shape, generator=generator).requires_grad_()
    sent = torch.randn(arguments.length, 1, arguments.heads * arguments.columns, generator=generator)
    kernels = Kernels(compiled=not arguments.plain)

    def run(variant: Variant) -> None:
        query, key, value = mixed.chunk(3, dim=-1)
        causal_attention(query, key, value, ROTARY, None, None, variant, kernels=kernels).backward(sent)
        mixed.grad = None

    return run


def report(arguments: Any) -> None:
    """Print a line for each variant."""
    run = one_pass(arguments)

    def timed(variant: Variant, number: int) -> float:
        start = time.process_time()
        run(variant)
        return time.process_time() - start

    runs: dict[str, Callable[[int], float]] = {
        name: partial(timed, variant) for name, variant in variants_of(arguments).items()
    }
    times = in_turn(runs, arguments.rounds, WARM_UP_ROUNDS)
    print(f"{'':24}{'ms':>9}{'ratio':>8}{'90 % interval':>18}")
    for name, values in times.items():
        ratio = Ratio.of(values, times["causal"])
        median = 1000 * sorted(values)[len(values) // 2]
        interval = f"{ratio.low:.3f} .. {ratio.high:.3f}"
        print(f"{name:24}{median:9.2f}{ratio.median:8.3f}{interval:>18}")


if __name__ == "__main__":
    main()
