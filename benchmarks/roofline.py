"""What a training step costs on GPUs by a roofline model: time by part, model FLOP utilisation, bounds.

    python benchmarks/roofline.py --gpu h100              # moe_1b on 8 GPUs, or --config and --ranks
    python benchmarks/roofline.py --all                   # every case of CASES, against the stored figures
    python benchmarks/roofline.py --all --store           # and store them

One rank's shard of the real model trains two steps on fake CUDA tensors (`megamoe.apps.plan`), and the
second is counted. No GPU is needed, and nothing is computed. The time is a model's, not a measurement.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from common.command import parser_of, positive, user_errors_exit_2  # noqa: E402
from megamoe.apps.plan import cuda_device  # noqa: E402

MODELS = Path("benchmarks/rooflines/models")
STORED = ROOT / "benchmarks/rooflines/expected.json"
# Of the code before it was made fast, never stored again: what later figures are compared with.
BASELINE = ROOT / "benchmarks/rooflines/baseline.json"
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
    parser.add_argument("--config", default=str(MODELS / "moe_1b.yaml"))
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--gpu", choices=("a100", "h100", "b200"), default="h100")
    parser.add_argument("--load", type=float, default=1.0, help="rows of the fullest rank over the mean")
    parser.add_argument("--json", action="store_true", help="print the figures alone, for all GPUs")
    parser.add_argument("--all", action="store_true", help="all cases; one process for each")
    parser.add_argument("--store", action="store_true", help=f"with --all: write {STORED.name}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    if options.all:
        return run_all(options.store)
    with user_errors_exit_2(parser):
        cuda_device.load()
        print(figures_of_one(options))
    return 0


def figures_of_one(options: argparse.Namespace) -> str:
    """Simulate one case, in this process."""
    from megamoe.compat.startup import configure_libraries
    from megamoe.config import load_config

    configure_libraries()
    from megamoe.apps.plan.rank import simulate_step
    from rooflines.report import figures, page

    config = load_config(options.config, options.overrides)
    costs = simulate_step(config, options.ranks, options.load)
    if options.json:
        return json.dumps(figures(costs))
    return page(costs, options.gpu, f"{options.config} {' '.join(options.overrides)}", options.ranks)


def run_all(store: bool) -> int:
    """Print a line for each case; compare with the stored figures, or write them."""
    found: dict[str, Any] = {}
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    for name in CASES:
        found[name] = run_case(name)
        times, before = found[name]["h100"], baseline[name.removesuffix(", tuned")]["h100"]
        print(f"{name:24} {found[name]['kernels']:6} kernels  {found[name]['bytes'] / 1e9:7.1f} GB  ", end="")
        print(
            f"{found[name]['flops'] / 1e12:7.2f} TFLOP  peak {found[name]['peak_bytes'] / 1e9:5.1f} GB  ",
            end="",
        )
        print(
            f"H100: {times['ms']:6.1f} ms, {times['utilisation']:.1%}, "
            f"overlapped {times['overlapped_utilisation']:.1%} (baseline {before['ms']:.1f} ms)",
            flush=True,
        )
    if store:
        STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    problems = [f"{name}: {line}" for name in CASES for line in differences(found[name], stored[name])]
    print("\n".join(problems))
    return 1 if problems else 0


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


def differences(found: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Return what is not within TOLERANCE of the stored figures."""
    return [
        f"{key}: found {found[key]}, expected {stored[key]} within {TOLERANCE:.0%}"
        for key in COUNTED
        if abs(found[key] - stored[key]) > TOLERANCE * stored[key]
    ]


if __name__ == "__main__":
    sys.exit(main())
