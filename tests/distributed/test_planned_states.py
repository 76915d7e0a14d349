"""What a simulated rank holds is what a real one holds, on 1, 2 and 4 ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.watched import measure
from tests.simulation.planned_states import CASES, run_of
from tests.simulation.test_simulation import needs_fake_device

ROOT = Path(__file__).parents[2]
STATES = ("parameters", "optimizer", "gradients", "buffers")


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


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_states_are_those_of_real_ranks(
    pool: Pool, tmp_path: Path, planned: list[dict[str, Any]], ranks: int
) -> None:
    """Weights, masters and moments, gradients, and buffers for gradients, to the byte."""
    numbers = [number for number, case in enumerate(CASES) if case[0] == ranks]
    runs = [run_of(number, str(tmp_path)) for number in numbers]
    found = pool.run(measure, runs, ranks=ranks, timeout_s=900)[0]
    for number, real in zip(numbers, found, strict=True):
        assert {name: real[name] for name in STATES} == planned[number], CASES[number][:3]
