"""Time and memory of our MoE layer beside what is possible, and beside other libraries' layers.

    python benchmarks/moe_layer.py [--shapes 1,3 | --shape T,H,F,E,k | --sweep | --uneven | --memory]
                                   [--candidates ours,limit,hf_grouped_mm] [--dtypes fp32,bf16] [--rounds 15]
                                   [--json FILE]

All candidates have the same SwiGLU experts, router and tokens, and compute in the same dtype; `router` names
the dtype of the scores (Hugging Face's are in the experts', and its weights at k = 1 are 1). `limit_grouped`
and `limit_bmm` are the experts without routing, on rows that stand grouped in equal numbers; ratios are to
the faster of the two. `dense` is a dense FFN of equal active FLOPs. `error`: the largest relative error of a
row of the output or of the input's gradient against a loop over experts in fp32.

Each round runs every candidate once, in changing order and on changing tokens; printed are medians over the
rounds, of ratios with the 90 % interval. `ahead`: the whole interval is under 1. A bar holds where the lower
end of the interval is under it.

--sweep: 8 to 512 experts. --uneven: our layer under uneven loads beside even ones. --memory: peak resident
memory of one forward and backward pass above the resting state, in a process for each candidate.

Ends with 1 if a bar does not hold or our layer is wrong, with 2 for a mistake.
"""

import argparse
import dataclasses
import sys
from typing import Any

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common.bars import holds, verdict  # noqa: E402
from common.command import names_of, positive, user_errors_exit_2, write_json  # noqa: E402
from common.machine import settle_process, versions  # noqa: E402
from common.rounds import Ratio  # noqa: E402
from layers.candidate import DTYPES, NotMeasured, Shape  # noqa: E402
from layers.catalogue import YARDSTICKS, candidates_of  # noqa: E402
from layers.loads import measure_uneven  # noqa: E402
from layers.measure import measure  # noqa: E402
from layers.memory import bytes_above_rest  # noqa: E402
from layers.report import as_data, show  # noqa: E402
from megamoe.apps.command import parser_of  # noqa: E402
from megamoe.errors import UserError  # noqa: E402

SHAPES = {
    "1": Shape(2048, 512, 1024, 8, 2),
    "2": Shape(4096, 256, 512, 64, 8),
    "3": Shape(2048, 768, 3072, 8, 1),
    "4": Shape(4096, 512, 128, 128, 8),
}
# Forward and backward over the limit, by shape.
BARS = {"1": 1.12, "2": 1.20, "3": 1.12, "4": 1.6}
SWEEP = {f"sweep {experts}": Shape(4096, 256, 256, experts, 2) for experts in (8, 16, 32, 64, 128, 256, 512)}
SWEEP_BAR, SWEEP_CANDIDATES = 1.3, "ours,limit,hf_grouped_mm"
# The largest load over the mean, by shape; UNEVEN_FACTOR for another.
UNEVEN, UNEVEN_FACTOR, UNEVEN_BAR = {"1": 3.0, "4": 4.7}, 3.0, 1.1
MEMORY_BAR = 1.2  # over the best other layer
ROUNDS = 15


class Bench:
    """One call of the command: what it measures, and what came out."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        _refuse_without_effect(arguments)
        self.rounds = arguments.rounds or ROUNDS
        self.shapes = _shapes_of(arguments)
        self.dtypes = names_of("--dtypes", arguments.dtypes, DTYPES)
        self.names = candidates_of(arguments.candidates or (SWEEP_CANDIDATES if arguments.sweep else None))
        self.json = arguments.json
        self.data: dict[str, Any] = {"versions": versions(), "cases": []}
        self.passes = True
        write_json(self.json, self.data)

    def times(self, name: str, shape: Shape, dtype: str) -> None:
        """Measure all candidates at one shape."""
        found = measure(shape, dtype, self.names, self.rounds)
        show(name, found)
        case = {"name": name, **as_data(found)}
        bar = SWEEP_BAR if name in SWEEP else BARS.get(name)
        ratio = found.over_limit("ours", "both") if "ours" in found.seconds else None
        if bar and ratio:
            case["bar"] = self.judge("ours over limit, fwd+bwd", ratio, bar)
        self.passes &= "ours" not in found.left_out
        self.keep(case)

    def uneven(self, name: str, shape: Shape, dtype: str) -> None:
        """Measure our layer under uneven loads beside even ones."""
        seconds, loads = measure_uneven(shape, dtype, UNEVEN.get(name, UNEVEN_FACTOR), self.rounds)
        text = ", ".join(f"{kind} {min(found):.2f} to {max(found):.2f}" for kind, found in loads.items())
        print(f"\n{name}: {shape}; {dtype}; largest load over the mean: {text}")
        ratios = {
            "fwd": Ratio.of(seconds["uneven"].forward, seconds["even"].forward),
            "fwd+bwd": Ratio.of(seconds["uneven"].both, seconds["even"].both),
        }
        bars = [self.judge(f"uneven over even, {kind}", ratio, UNEVEN_BAR) for kind, ratio in ratios.items()]
        times = {kind: dataclasses.asdict(found) for kind, found in seconds.items()}
        case = {"name": name, "shape": dataclasses.asdict(shape), "dtype": dtype}
        self.keep({**case, "loads": loads, "seconds": times, "bars": bars})

    def memory(self, name: str, shape: Shape, dtype: str) -> None:
        """Measure the memory of one pass of every candidate."""
        print(f"\n{name}: {shape}; {dtype}; MB above the resting state, forward and backward")
        found: dict[str, int] = {}
        left_out: dict[str, str] = {}
        for candidate in self.names:
            try:
                found[candidate] = bytes_above_rest(candidate, shape, dtype)
                print(f"{candidate:20}{found[candidate] / 1e6:9.1f}", flush=True)
            except NotMeasured as reason:
                left_out[candidate] = str(reason)
                print(f"{candidate:20} not measured: {reason}", flush=True)
        case = {"name": name, "shape": dataclasses.asdict(shape), "dtype": dtype}
        others = [size for other, size in found.items() if other not in ("ours", *YARDSTICKS)]
        if "ours" in found and others:
            ratio = found["ours"] / min(others)
            case["bar"] = self.judge("ours over the best other", Ratio(ratio, ratio, ratio), MEMORY_BAR)
        self.passes &= "ours" not in left_out
        self.keep({**case, "bytes": found, "not measured": left_out})

    def judge(self, what: str, ratio: Ratio, bar: float) -> dict[str, Any]:
        """Print a bar's line; the same as data."""
        print(verdict(what, ratio, bar), flush=True)
        self.passes &= holds(ratio, bar)
        return {"what": what, **dataclasses.asdict(ratio), "bar": bar, "pass": holds(ratio, bar)}

    def keep(self, case: dict[str, Any]) -> None:
        """Write the file after every case, so that a long run that is ended leaves what it has."""
        self.data["cases"].append(case)
        write_json(self.json, self.data)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with user_errors_exit_2(parser):
        bench = Bench(arguments)
        settle_process()
        print(", ".join(f"{name} {value}" for name, value in bench.data["versions"].items()))
        run = bench.uneven if arguments.uneven else bench.memory if arguments.memory else bench.times
        for name, shape in bench.shapes.items():
            for dtype in bench.dtypes:
                run(name, shape, dtype)
    return 0 if bench.passes else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", help=f"of {', '.join(SHAPES)}; default: all")
    what.add_argument("--shape", metavar="T,H,F,E,k")
    what.add_argument("--sweep", action="store_true")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--uneven", action="store_true")
    kind.add_argument("--memory", action="store_true")
    parser.add_argument("--candidates", help="names separated by commas; default: all")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--rounds", type=positive, help=f"default: {ROUNDS}")
    parser.add_argument("--json", metavar="FILE")
    return parser


def _refuse_without_effect(arguments: argparse.Namespace) -> None:
    if arguments.uneven and arguments.candidates:
        raise UserError("--candidates: --uneven measures our layer alone; leave one of them out")
    if arguments.memory and arguments.rounds:
        raise UserError("--rounds: --memory runs one pass in each process; leave one of them out")


def _shapes_of(arguments: argparse.Namespace) -> dict[str, Shape]:
    if arguments.shape:
        return {"shape": Shape.parse(arguments.shape)}
    if arguments.sweep:
        return SWEEP
    default = UNEVEN if arguments.uneven else SHAPES
    names = names_of("--shapes", arguments.shapes or ",".join(default), SHAPES)
    return {name: SHAPES[name] for name in names}


if __name__ == "__main__":
    sys.exit(main())
