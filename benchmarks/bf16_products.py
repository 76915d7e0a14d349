"""Products and an MoE layer in bf16 beside fp32, on a CPU with or without products in bf16.

python benchmarks/bf16_products.py
ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/bf16_products.py     # as without AVX-512

Rounds of all rows are interleaved; shown are medians in ms, and the median of the rounds' ratios to fp32. The
row `PyTorch` is bf16 as PyTorch computes it here. It is left out with --widened, and where a product in bf16
takes seconds the MoE layer is measured with widened products only.

--libraries: instead, our MoE layer in bf16 with widened products beside those of other libraries, which
compute as PyTorch does here; the median of the rounds' ratios to ours. It takes minutes without AVX-512.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional

from layers.candidate import Shape, Weights
from layers.catalogue import CANDIDATES, candidates_of
from layers.measure import build, inputs_of, run_once
from megamoe.compat.torch_compat import has_bf16_products, widen_bf16_products
from megamoe.config import parse_config
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext

TOKENS, HIDDEN, FFN, EXPERTS = 2048, 512, 1024, 8


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--widened", action="store_true", help="only widened products beside fp32")
    parser.add_argument("--libraries", metavar="NAMES", help="such as hf_eager,hf_grouped_mm")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"products in bf16 by this processor: {has_bf16_products()}; {options.threads} threads")
    if options.libraries:
        _compare_libraries(candidates_of(options.libraries), options.rounds)
        return
    cases = _cases()
    if not options.widened:
        for name in ("linear", "batched"):
            _compare(name, "PyTorch", cases[name], options.rounds)
    library = widen_bf16_products()
    for name, case in cases.items():
        _compare(name, "widened", case, options.rounds)
    library._destroy()


def _cases() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Of each case, what is computed in fp32 and in bf16."""
    rows, weight = torch.randn(TOKENS, HIDDEN), torch.randn(FFN, HIDDEN)
    left, right = torch.randn(EXPERTS, HIDDEN, HIDDEN), torch.randn(EXPERTS, HIDDEN, FFN)
    narrow = [each.bfloat16() for each in (rows, weight, left, right)]
    router = {"selector": {"name": "top_k", "k": 2}}
    config = parse_config({"moe": {"num_experts": EXPERTS, "router": router, "num_shared_experts": 0}}).moe
    shape = LayerShape(HIDDEN, FFN, 1, "swiglu", init_std=0.02, output_std=0.02, seed=1, vocab_size=32)
    layer = MoELayer(config, shape, StepContext())
    narrow_layer = copy.deepcopy(layer)
    for parameter in narrow_layer.experts.parameters():
        parameter.data = parameter.data.bfloat16()

    def both_ways(module: MoELayer, hidden_TH: Tensor) -> None:
        output = module(hidden_TH.clone().requires_grad_())
        output.float().square().mean().backward()

    return {
        "linear": (lambda: functional.linear(rows, weight), lambda: functional.linear(narrow[0], narrow[1])),
        "batched": (lambda: torch.bmm(left, right), lambda: torch.bmm(narrow[2], narrow[3])),
        "MoE layer": (lambda: both_ways(layer, rows), lambda: both_ways(narrow_layer, narrow[0])),
    }


def _compare_libraries(names: list[str], rounds: int) -> None:
    shape = Shape(TOKENS, HIDDEN, FFN, EXPERTS, 2)
    weights = Weights.draw(shape)
    layers = {name: build(CANDIDATES[name], shape, "bf16", weights) for name in ("ours", *names)}
    rows = [inputs_of(CANDIDATES[name].rows, shape, "bf16", 0) for name in layers]
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for round_ in range(1 + rounds):  # the first one warms up
        for (name, layer), hidden_TH in zip(layers.items(), rows, strict=True):
            library = widen_bf16_products() if name == "ours" and not has_bf16_products() else None
            seconds = run_once(layer, hidden_TH, torch.ones_like(hidden_TH))[1]
            if library is not None:
                library._destroy()
            if round_:
                taken[name].append(seconds)
    for name in names:
        ratio = statistics.median(other / own for other, own in zip(taken[name], taken["ours"], strict=True))
        own, other = (1000 * statistics.median(taken[each]) for each in ("ours", name))
        print(f"{name:>20}  {other:9.1f} ms, ours {own:9.1f} ms, ratio {ratio:6.2f}", flush=True)


def _compare(name: str, form: str, case: tuple[Callable[[], object], ...], rounds: int) -> None:
    pairs = []
    for work in case:
        work()
    for _ in range(rounds):
        pairs.append([_seconds(work) for work in case])
    wide, narrow = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for other, one in pairs)
    print(
        f"{name:>10}  {form:>8}  fp32 {wide:9.2f} ms  bf16 {narrow:9.2f} ms  ratio {ratio:6.2f}", flush=True
    )


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
