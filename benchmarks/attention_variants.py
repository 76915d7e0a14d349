"""What windows, sinks and soft caps cost in attention: processor time beside plain causal attention.

    python benchmarks/attention_variants.py [--length 2048] [--heads 8] [--columns 64] [--window 128]
                                            [--plain] [--rounds 9]

Measured is causal attention with rotary positions over one sequence, forward and backward, in fp32 on the
CPU. Each variant and attention without any are measured in turn, in one process; printed are medians of the
rounds' processor time of all threads, and of its ratio to the causal pass with the 90 % interval.

--plain: PyTorch's operators, not the compiled kernels.
"""

import time
from typing import Any

import torch

from common.attention import one_pass, show_ratios
from common.command import parser_of, positive
from common.machine import cpu_model, settle_process
from megamoe.kernels.attention.variants import PLAIN, Variant


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
    run = one_pass((arguments.length, 1, arguments.heads, arguments.columns), arguments.plain)
    cases = {name: (None, None, variant) for name, variant in variants_of(arguments).items()}
    show_ratios(run, cases, arguments.rounds, time.process_time)


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


if __name__ == "__main__":
    main()
