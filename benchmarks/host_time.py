"""The host's time of a step of moe_1b on a GPU, measured without one.

    python benchmarks/host_time.py [--steps 25] [--functions] [section.key=value ...]

The step runs on the pretended CUDA device of the tests, with numbers so small that only the host counts.
Triton prepares each launch and launches nothing; the time in other kernels and in collectives is taken away.
It prints the least and the median of the steps, the launches by kernel against `host/budget.json`, and with
--functions the functions that take most. Exit code 1 if a budget is exceeded.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.command import positive
from megamoe.apps.command import parser_of

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).parent / "host/budget.json"
TIMEOUT_S = 900
MOST_SHOWN = 12  # kernels


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=positive, default=25)
    parser.add_argument("--functions", action="store_true", help="also the functions that take most")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    more = ["--profile"] if options.functions else []
    found = measure(options.steps, [*more, *options.overrides])
    print("\n".join(report(found)))
    return 1 if any(above(found, json.loads(BUDGET.read_text()))) else 0


def measure(steps: int, arguments: list[str]) -> dict[str, Any]:
    """Run the steps in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks/host/measure.py"), str(steps), *arguments]
    path = str(ROOT / "benchmarks")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment(path: str) -> dict[str, str]:
    """Return the variables of the process: one thread, and benchmarks importable."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}


def counted(found: dict[str, Any]) -> dict[str, int]:
    """Return what a step launches and where it waits: the last step's numbers."""
    last = found["steps"][-1]
    return {"kernels": sum(last["kernels"].values()), "triton": last["triton"], "waits": last["waits"]}


def above(found: dict[str, Any], budget: dict[str, int]) -> Iterator[str]:
    """Yield a line for each number over its budget."""
    for name, number in counted(found).items():
        if number > budget[name]:
            yield f"{name}: {number}, budget {budget[name]}"


def report(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    seconds = [step["seconds"] for step in found["steps"]]
    yield f"host: {min(seconds) * 1e3:.1f} ms a step at least, median {statistics.median(seconds) * 1e3:.1f}"
    numbers = counted(found)
    yield ", ".join(f"{name} {number}" for name, number in numbers.items())
    yield from above(found, json.loads(BUDGET.read_text()))
    kernels = found["steps"][-1]["kernels"]
    for name in sorted(kernels, key=lambda name: -kernels[name])[:MOST_SHOWN]:
        yield f"{kernels[name]:6d}  {name}"
    for function in found.get("functions", []):
        yield f"{function['us']:8.0f} us, {function['calls']:6.0f} calls: {function['name']}"


if __name__ == "__main__":
    sys.exit(main())
