"""What a training step costs on GPUs by a roofline model: the cases of CASES, against the stored figures.

    python benchmarks/roofline.py                         # every case
    python benchmarks/roofline.py --store                 # and store what is counted
    python benchmarks/roofline.py --json --config FILE --ranks 8 [section.key=value ...]

--json prints the figures of one configuration on all GPUs alone; `tools/plan.py` shows them as a page. One
rank's shard of the real model trains two steps on fake CUDA tensors (`megamoe.apps.plan`), and the second is
counted. No GPU is needed, and nothing is computed. The time is a model's, not a measurement.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from common.command import positive, user_errors_exit_2  # noqa: E402
from megamoe.apps.command import parser_of  # noqa: E402
from megamoe.apps.plan import cuda_device  # noqa: E402

MODELS = Path("benchmarks/rooflines/models")
STORED = ROOT / "benchmarks/rooflines/expected.json"
TOLERANCE = 0.02
# What a user on CUDA would set, beside the layout: reductions beside the backward pass, and Triton's experts.
TUNED = ["parallel.deepspeed=ds_configs/zero1_bf16_cuda.json", "model.gpu_kernels=triton"]
# Name of a case: the model, ranks, load of the fullest expert-parallel rank, overrides.
CASES: dict[str, tuple[str, int, float, list[str]]] = {
    "moe_1b, EP 8": ("moe_1b", 8, 1.0, []),
    "moe_1b, EP 8, load 2": ("moe_1b", 8, 2.0, []),
    "moe_1b, EP 8, load 4": ("moe_1b", 8, 4.0, []),
    "moe_1b, EP 1": ("moe_1b", 8, 1.0, ["parallel.expert=1"]),
    "moe_1b, EP 8, tuned": ("moe_1b", 8, 1.0, TUNED),
    "moe_1b, EP 1, tuned": ("moe_1b", 8, 1.0, [*TUNED, "parallel.expert=1"]),
    "mixtral_like, EP 8": ("mixtral_like", 64, 1.0, []),
    "experts_256, EP 32": ("experts_256", 64, 1.0, []),
}
COUNTED = ("kernels", "bytes", "flops", "peak_bytes", "collective_bytes", "host_waits")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; exit code 1 where a figure is not the stored one, 2 for a user's mistake."""
    parser = parser_of(__doc__)
    parser.add_argument("--store", action="store_true", help=f"write {STORED.name}")
    parser.add_argument("--json", action="store_true", help="print the figures of one configuration")
    parser.add_argument("--config", default=str(MODELS / "moe_1b.yaml"))
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--load", type=float, default=1.0, help="rows of the fullest rank over the mean")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    if not options.json:
        return run_all(options.store)
    with user_errors_exit_2(parser):
        cuda_device.load()
        print(json.dumps(figures_of_one(options)))
    return 0


def figures_of_one(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate one configuration; return counts of the step, and its time on every GPU of the table."""
    from megamoe.compat.startup import configure_libraries
    from megamoe.config import load_config

    configure_libraries()
    from megamoe.apps.plan.assumptions import ASSUMED, OPTIMISTIC, PESSIMISTIC
    from megamoe.apps.plan.hardware import GPUS
    from megamoe.apps.plan.rank import simulate_step
    from megamoe.apps.plan.roofline import host_seconds, roofline

    costs = simulate_step(load_config(options.config, options.overrides), options.ranks, options.load)
    operators, collectives = costs.counts.operators, costs.counts.collectives
    found: dict[str, Any] = {
        "kernels": sum(total.launches for total in operators.values()),
        "bytes": sum(total.bytes for total in operators.values()),
        "flops": sum(total.flops for total in operators.values()),
        "peak_bytes": costs.peak.bytes,
        "collective_bytes": sum(t.bytes for key, t in collectives.items() if len(key.ranks) > 1),
        "host_waits": costs.counts.waits.total(),
        "parameters": costs.parameters,
        "tokens": costs.tokens,
        "host_seconds": host_seconds(costs.counts, ASSUMED),
        "peak_by_category": costs.peak.by_category,
    }
    for name, gpu in GPUS.items():
        times, *bounds = (roofline(costs, gpu, case) for case in (ASSUMED, OPTIMISTIC, PESSIMISTIC))
        whole, *overlapped = (
            {"ms": round(seconds * 1e3, 2), "utilisation": round(times.model_flops / (seconds * gpu.bf16), 4)}
            for seconds in (times.seconds, *(each.seconds - each.hidden for each in (times, *bounds)))
        )
        cases = dict(zip(("overlapped", "optimistic", "pessimistic"), overlapped, strict=True))
        parts = {part: round(seconds * 1e3, 2) for part, seconds in sorted(times.parts.items())}
        found[name] = {**whole, **cases, "parts_ms": parts}
    return found


def run_all(store: bool) -> int:
    """Print a line for each case; compare with the stored figures, or write them."""
    found: dict[str, Any] = {}
    for name in CASES:
        found[name] = each = run_case(name)
        times, overlapped = each["h100"], each["h100"]["overlapped"]
        print(
            f"{name:24} {each['kernels']:6} kernels  {each['bytes'] / 1e9:7.1f} GB  "
            f"{each['flops'] / 1e12:7.2f} TFLOP  peak {each['peak_bytes'] / 1e9:5.1f} GB  "
            f"H100: {times['ms']:6.1f} ms, {times['utilisation']:.1%}, "
            f"overlapped {overlapped['ms']:6.1f} ms, {overlapped['utilisation']:.1%}",
            flush=True,
        )
    if store:
        counted = {name: {key: each[key] for key in COUNTED} for name, each in found.items()}
        STORED.write_text(json.dumps(counted, indent=1) + "\n", encoding="utf-8")
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    problems = [
        f"{name}: {key}: found {found[name][key]}, expected {stored[name][key]} within {TOLERANCE:.0%}"
        for name in CASES
        for key in COUNTED
        if abs(found[name][key] - stored[name][key]) > TOLERANCE * stored[name][key]
    ]
    print("\n".join(problems))
    return int(bool(problems))


def run_case(name: str) -> dict[str, Any]:
    """Return the figures of one case of CASES, simulated in a process of its own."""
    model, ranks, load, overrides = CASES[name]
    command = [sys.executable, "-W", "ignore", __file__, "--json", "--config", str(MODELS / f"{model}.yaml")]
    command += ["--ranks", str(ranks), "--load", str(load), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
