"""What a simulated rank holds and sends is what a real one does, on 1, 2 and 4 ranks."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.watched import measure
from tests.simulation.planned_states import CASES, STATES, run_of
from tests.simulation.test_simulation import needs_fake_device

ROOT = Path(__file__).parents[2]
# The others are not compared: those of EP among them depend on the load of the experts, or have padding.
SENT = {6, 8, 9, 10, 12, 19}
# Those in fp32 and without buckets of DeepSpeed, which are larger than all activations here.
PEAK = {0, 6, 12, 15}
REDUCTIONS = ("allreduce", "reduce_scatter_base")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process for all cases."""
    needs_fake_device()
    folder = str(tmp_path_factory.mktemp("planned"))
    numbers = map(str, range(len(CASES)))
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.planned_states", folder, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module", params=[1, 2, 4])
def real(
    request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """Of rank 0, by the number of the case; one world for all cases of so many ranks."""
    folder = str(tmp_path_factory.mktemp("real"))
    numbers = [number for number, case in enumerate(CASES) if case[0] == request.param]
    runs = [run_of(number, folder) for number in numbers]
    found = pool.run(measure, runs, ranks=request.param, timeout_s=900)[0]
    return dict(zip(numbers, found, strict=True))


@pytest.mark.full
def test_states(planned: list[dict[str, Any]], real: dict[int, dict[str, Any]]) -> None:
    """Weights, masters and moments, gradients, and buffers for gradients, to the byte."""
    for number, found in real.items():
        expected = {name: planned[number][name] for name in STATES}
        assert {name: found[name] for name in STATES} == expected, CASES[number][:3]


@pytest.mark.full
def test_collectives(planned: list[dict[str, Any]], real: dict[int, dict[str, Any]]) -> None:
    """Bytes by kind and number of ranks."""
    for number in SENT & real.keys():
        summed = CASES[number][1] == "zero1_bf16"
        sent, expected = (comparable(of["sent"], summed) for of in (real[number], planned[number]))
        assert sent == pytest.approx(expected, rel=0.01), CASES[number][:3]


@pytest.mark.full
def test_peak(planned: list[dict[str, Any]], real: dict[int, dict[str, Any]]) -> None:
    """The most that a step holds beside the states: activations, gradients and temporary tensors."""
    for number in PEAK & real.keys():
        assert planned[number]["most"] == pytest.approx(real[number]["most"], rel=0.1), CASES[number][:3]


def comparable(sent: dict[str, int], summed: bool) -> Counter[str]:
    """Return the bytes without those of groups of one rank, and without the one comparison of ZeRO 3.

    summed: reduce-scatter and all-reduce are one kind. Gradients at ZeRO 1 in bf16 take the first on CUDA
    and the second on a CPU.
    """
    found: Counter[str] = Counter()
    for name, size in sent.items():
        kind, ranks = name.split(" of ")
        if ranks != "1" and kind != "broadcast":
            found[f"reduction of {ranks}" if summed and kind in REDUCTIONS else name] += size
    return found
