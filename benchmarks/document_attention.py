"""What documents cost in attention: time beside plain causal attention, and memory by the sequence's length.

    python benchmarks/document_attention.py [--length 2048] [--sequences 1] [--heads 8] [--columns 64]
                                            [--dtype fp32] [--plain] [--rounds 15]
                                            [--memory 4096,8192]

A sequence is packed with documents in several ways: one document, documents of equal lengths, and lengths of
a log-normal distribution (median 300 tokens, sigma 1.3; cut at the sequence's end). Measured is attention
with rotary positions, forward and backward, on the CPU. Each way and causal attention over whole sequences
are measured in turn, in one process; printed are medians of the rounds' ratios with their 90 % interval. The
bar: with documents at most 1.1 times the causal pass, by the interval's lower end (the line says `over`).

--plain: PyTorch's operators, not the compiled kernels; --dtype bf16 always has these.

--memory: for each length, a process of its own makes one forward and backward pass over documents of 64
tokens, and prints by how much its peak resident memory grew. The bar: from one length to the next it grows at
most 1.1 times as much as the length. A mask of S x S booleans would grow with the square.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from common.attention import one_pass, show_ratios
from common.command import parser_of, positive
from common.machine import cpu_model, settle_process
from megamoe.kernels.attention.documents import Documents

BAR = 1.1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEDIAN_LENGTH, SIGMA = 300, 1.3
MEMORY_LENGTH = 64  # of the documents whose memory is measured
CHILD = "--one-pass"


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=positive, default=2048)
    parser.add_argument("--sequences", type=positive, default=1)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--columns", type=positive, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--memory", help="lengths, separated by commas, the shortest first")
    parser.add_argument(
        CHILD, type=positive, help="measure the memory of one pass of this length; used by --memory"
    )
    arguments = parser.parse_args()
    settle_process()
    if arguments.one_pass is not None:
        print(growth_of_one_pass(arguments))
        return 0
    print(f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    shape = f"{arguments.sequences} x {arguments.heads} heads of {arguments.columns}, {arguments.dtype}"
    print(f"{shape}, {'plain' if arguments.plain else 'compiled where there are kernels'}")
    return report_memory(arguments) if arguments.memory else report_time(arguments)


def packings(length: int, sequences: int) -> dict[str, Documents]:
    """Return, by a description, the documents of sequences of `length` tokens."""
    sizes = [length, length // 2, 512, 128, 64, 16, 1]
    found = {
        f"documents of {size}": documents_of([[size] * (length // size + 1)] * sequences, length)
        for size in dict.fromkeys(sizes)
        if 0 < size <= length
    }
    generator = np.random.default_rng(1)
    drawn = [
        (generator.lognormal(np.log(MEDIAN_LENGTH), SIGMA, length) + 1).astype(int).tolist()
        for _ in range(sequences)
    ]
    return found | {"log-normal lengths": documents_of(drawn, length)}


def documents_of(lengths: list[list[int]], total: int) -> Documents:
    """From each sequence's lengths, cut where the sequence ends."""
    starts = []
    for row in lengths:
        end_D = torch.tensor(row).cumsum(0)
        start_D = torch.cat((torch.tensor([0]), end_D))
        starts.append(start_D[torch.searchsorted(end_D, torch.arange(total), right=True)])
    return Documents.of(torch.stack(starts))


def pass_of(arguments: Any, length: int) -> Callable[..., None]:
    """Return a pass over sequences of this length."""
    shape = (length, arguments.sequences, arguments.heads, arguments.columns)
    return one_pass(shape, arguments.plain, DTYPES[arguments.dtype])


def report_time(arguments: Any) -> int:
    """Print a line for each packing; 1 if one is over the bar."""
    found = packings(arguments.length, arguments.sequences)
    cases = {"causal": (None, None)} | {name: (None, packed) for name, packed in found.items()}
    print(f"{arguments.length} tokens a sequence; forward and backward, {arguments.rounds} rounds")
    run = pass_of(arguments, arguments.length)
    return int(show_ratios(run, cases, arguments.rounds, time.perf_counter, BAR))


def growth_of_one_pass(arguments: Any) -> int:
    """Return by how many KiB the peak resident memory of this process grows in one pass, inputs included."""
    warm = pass_of(arguments, MEMORY_LENGTH)  # what is loaded at the first call
    warm(None, documents_of([[MEMORY_LENGTH]] * arguments.sequences, MEMORY_LENGTH))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    length = arguments.one_pass
    packed = documents_of([[MEMORY_LENGTH] * (length // MEMORY_LENGTH + 1)] * arguments.sequences, length)
    pass_of(arguments, length)(None, packed)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def report_memory(arguments: Any) -> int:
    """Print the growth for each length; 1 if it grows faster than the length."""
    lengths = [int(text) for text in arguments.memory.split(",")]
    options = [argument for argument in sys.argv[1:] if not argument.startswith("--memory")]
    options = [argument for argument in options if argument != arguments.memory]
    found = {}
    for length in lengths:
        command = [sys.executable, __file__, *options, CHILD, str(length)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[length] = int(done.stdout)
        mask = length**2 * arguments.sequences / 2**20
        print(
            f"{length:6} tokens: peak grew by {found[length] / 1024:7.1f} MiB (a bool mask: {mask:.0f} MiB)"
        )
    missed = False
    for short, long in pairwise(lengths):
        ratio, linear = found[long] / found[short], long / short
        missed |= ratio > BAR * linear
        print(f"{short} to {long}: {ratio:.2f} times the memory, linear would be {linear:.2f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
