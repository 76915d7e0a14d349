"""The compiled CPU passes beside torch.compile of their plain forms, forward and backward.

    python benchmarks/compiled_passes.py [--shape demo | --shape large] [--dtypes fp32,bf16]
                                         [--passes swiglu,rotary] [--rounds 15]
    python benchmarks/compiled_passes.py --startup [--shape ...] [--dtypes ...]

Every candidate runs once in each round, in changing order. On one thread (OMP_NUM_THREADS=1) the thread's
CPU time is measured, which other programs on the machine change little; on several, the elapsed time. Printed
are the medians in milliseconds of a forward and a backward pass by PyTorch's operators (`plain`), by the
compiled library (`ours`) and by torch.compile, and the medians of the rounds' ratios with the 90 % interval.
`share`: the time that the library saves over torch.compile in a step of the shape, by the number of uses.

--startup: seconds of the first forward and backward pass of all passes together by torch.compile, in a fresh
process, with an empty cache (`cold`) and with the cache that this left (`warm`); the same for the library.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from common.bars import interval
from common.command import names_of, parser_of, positive, user_errors_exit_2
from common.machine import settle_process, versions
from common.rounds import Ratio, in_turn
from megamoe.errors import UserError
from megamoe.kernels.attention.rotary import Rotary, angles_of, apply_rotary, plain_rotate_half
from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts.rows import RowTokens, combine, plain_combine, plain_swiglu, swiglu
from megamoe.kernels.library import find_library
from megamoe.kernels.rms_norm import rms_norm
from megamoe.kernels.router import masked
from megamoe.moe import rng
from steps.shapes import SHAPES, Shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS, PLAIN, COMPILED = "ours", "plain", "torch.compile"
WARM_UP = 3
ROTARY = Rotary(10000.0)
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Pass:
    """One pass: ours and its plain form take the same inputs. uses: calls in a step of the shape."""

    ours: Function
    plain: Function
    inputs: list[Tensor]
    uses: int


def passes_of(shape: Shape, dtype: torch.dtype) -> dict[str, Pass]:
    """Return all passes, with inputs of the shape of one micro batch."""
    kernels, rows_in_all = Kernels(), shape.tokens * shape.choices
    torch.manual_seed(0)

    def leaf(*sizes: int) -> Tensor:
        return torch.randn(*sizes).to(dtype).requires_grad_()

    heads = leaf(shape.sequence, shape.tokens // shape.sequence, shape.heads, shape.hidden // shape.heads)
    turns = angles_of(heads, len(heads), ROTARY)
    rows = RowTokens.of(torch.randint(shape.tokens, (rows_in_all,)), shape.tokens, kernels)
    weight_N = torch.rand(rows_in_all, requires_grad=True)
    index_T, width = torch.arange(shape.tokens), (shape.hidden,)
    scores_TE = torch.randn(shape.tokens, shape.experts, requires_grad=True)
    kept_TE = torch.rand(shape.tokens, shape.experts) > 0.5
    return {
        "swiglu": Pass(
            partial(swiglu, kernels=kernels), plain_swiglu, [leaf(rows_in_all, 2 * shape.ffn)], shape.blocks
        ),
        "rms_norm": Pass(
            lambda hidden, weight: rms_norm(hidden, weight, 1e-5, kernels),
            lambda hidden, weight: functional.rms_norm(hidden, width, weight, 1e-5),
            [leaf(shape.tokens, shape.hidden), leaf(shape.hidden)],
            2 * shape.blocks + 1,
        ),
        "rotary": Pass(
            lambda heads: apply_rotary(heads, ROTARY, kernels),
            lambda heads: plain_rotate_half(heads, *turns),
            [heads],
            2 * shape.blocks,
        ),
        "combine": Pass(
            lambda rows_NH, weight_N: combine(rows_NH, weight_N, rows, kernels),
            lambda rows_NH, weight_N: plain_combine(rows_NH, weight_N, rows),
            [leaf(rows_in_all, shape.hidden), weight_N],
            shape.blocks,
        ),
        "draws": Pass(
            lambda index_T: rng.uniform(7, index_T, shape.hidden, kernels=kernels),
            lambda index_T: rng.plain_uniform(7, index_T, shape.hidden),
            [index_T],
            shape.blocks,
        ),
        "masked": Pass(
            lambda scores_TE: masked(scores_TE, kept_TE, -1.0, kernels),
            lambda scores_TE: torch.where(kept_TE, scores_TE, -1.0),
            [scores_TE],
            shape.blocks,
        ),
    }


def run(function: Function, inputs: list[Tensor], number: int = 0) -> float:
    """Return seconds of a forward pass, and of a backward pass where an input wants a gradient."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    output = function(*inputs)
    if output.requires_grad:
        torch.autograd.grad(output, inputs, torch.ones_like(output))
    return clock() - started


def compiled(each: Pass) -> Function:
    """Return the plain form by torch.compile; a graph break is an error."""
    function: Function = torch.compile(each.plain, fullgraph=True, dynamic=False)
    return function


def show_times(name: str, each: Pass, rounds: int) -> None:
    """Measure one pass and print its line."""
    candidates = {OURS: each.ours, PLAIN: each.plain, COMPILED: compiled(each)}
    runs = {key: partial(run, function, each.inputs) for key, function in candidates.items()}
    seconds = in_turn(runs, rounds, WARM_UP)
    median = {key: 1e3 * statistics.median(values) for key, values in seconds.items()}
    saved = each.uses * (median[COMPILED] - median[OURS])
    print(
        f"{name:<10}{median[PLAIN]:10.3f}{median[OURS]:10.3f}{median[COMPILED]:10.3f}"
        f"   ours / torch.compile {interval(Ratio.of(seconds[OURS], seconds[COMPILED]))}"
        f"   ours / plain {interval(Ratio.of(seconds[OURS], seconds[PLAIN]))}   share {saved:.2f} ms",
        flush=True,
    )


def show_startup(shape: str, dtype: str) -> None:
    """Print the seconds of first calls in fresh processes."""
    with tempfile.TemporaryDirectory() as cache:
        for who in (COMPILED, OURS):
            for when in ("cold", "warm"):
                print(f"{dtype} {who} {when}: {_in_a_child(shape, dtype, who, cache)}", flush=True)


def _in_a_child(shape: str, dtype: str, who: str, cache: str) -> str:
    command = [sys.executable, __file__, "--first-calls", who, "--shape", shape, "--dtypes", dtype]
    places = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "XDG_CACHE_HOME": cache}
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the child failed: {done.stderr.splitlines()[-1:]}")
    return done.stdout.strip()


def first_calls(shape: Shape, dtype: torch.dtype, who: str) -> None:
    """Print the seconds of the first call of each pass, and their sum; of ours with the library's build."""
    started = time.perf_counter()
    find_library()
    seconds = {"library": time.perf_counter() - started} if who == OURS else {}
    passes = passes_of(shape, dtype)
    for name, each in passes.items():
        started = time.perf_counter()
        run(each.ours if who == OURS else compiled(each), each.inputs)
        seconds[name] = time.perf_counter() - started
    shown = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    print(f"{sum(seconds.values()):.1f} s ({shown})")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--passes")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--startup", action="store_true")
    parser.add_argument("--first-calls", choices=(OURS, COMPILED), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure what the command line asks for."""
    parser = _parser()
    arguments = parser.parse_args()
    with user_errors_exit_2(parser):
        settle_process()
        shape = SHAPES[arguments.shape]
        dtypes = names_of("--dtypes", arguments.dtypes, DTYPES)
        if not arguments.first_calls:
            print(versions(), f"shape {arguments.shape}")
        for dtype in dtypes:
            if arguments.startup:
                show_startup(arguments.shape, dtype)
                continue
            if arguments.first_calls:
                first_calls(shape, DTYPES[dtype], arguments.first_calls)
                continue
            passes = passes_of(shape, DTYPES[dtype])
            print(f"{dtype:<10}{PLAIN:>10}{OURS:>10}{COMPILED:>14}  (ms)")
            for name in names_of("--passes", arguments.passes, passes):
                show_times(name, passes[name], arguments.rounds)


if __name__ == "__main__":
    main()
