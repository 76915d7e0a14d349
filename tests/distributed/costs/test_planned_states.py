"""What a simulated rank holds and sends is what a real one does, on 1, 2 and 4 ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.apps.planned_states import CASES, STATES, run_of
from tests.support.in_subprocess import needs_fake_device
from tests.support.ranks.pool import Pool
from tests.support.ranks.watched import measure

ROOT = Path(__file__).parents[3]
ALL = pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number][:3]))
ON_READING = 4  # bytes of an all-reduce in which the ranks say that they have read their batch


@pytest.fixture(scope="module")
def real(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of the first rank of a stage, by the number of the case; one world for all cases of so many ranks."""
    folder = str(tmp_path_factory.mktemp("real"))
    found: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        numbers = [number for number, case in enumerate(CASES) if case[0] == ranks]
        runs = [run_of(number, folder) for number in numbers]
        of_ranks = pool.run(measure, runs, ranks=ranks, timeout_s=900)
        for place, number in enumerate(numbers):
            sizes = CASES[number][2]
            rank = sizes.get("stage", 0) * ranks // sizes.get("pipeline", 1)
            found[number] = of_ranks[rank][place]
    return [found[number] for number in range(len(CASES))]


@pytest.fixture(scope="module")
def planned_on_cuda(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    needs_fake_device()
    return planned_on("cuda", tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def planned_on_cpu(real: list[dict[str, Any]], tmp_path_factory: Any) -> list[dict[str, Any]]:
    """With the operators of a CPU, and the load of the experts that the real ranks had."""
    folder = tmp_path_factory.mktemp("cpu")
    counts = {number: found["counts"] for number, found in enumerate(real)}
    (folder / "counts.json").write_text(json.dumps(counts))
    return planned_on("cpu", folder)


def planned_on(device: str, folder: Path) -> list[dict[str, Any]]:
    """One process for all cases."""
    numbers = map(str, range(len(CASES)))
    module = "tests.support.apps.planned_states"
    command = [sys.executable, "-W", "ignore", "-m", module, device, str(folder), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
@ALL
def test_states(number: int, planned_on_cuda: list[dict[str, Any]], real: list[dict[str, Any]]) -> None:
    """Weights, masters and moments, gradients, and buffers for gradients, to the byte.

    With pipeline stages the norm of the gradient, a scalar, is freed at another time.
    """
    expected = {name: real[number][name] for name in STATES}
    scalar = 8 if "pipeline" in CASES[number][2] else 0
    found = {name: planned_on_cuda[number][name] for name in STATES}
    assert found == pytest.approx(expected, abs=scalar, rel=0)


@pytest.mark.full
@ALL
def test_collectives(number: int, planned_on_cpu: list[dict[str, Any]], real: list[dict[str, Any]]) -> None:
    """Bytes by kind and number of ranks."""
    sent, expected = (among_several(each[number]["sent"]) for each in (planned_on_cpu, real))
    assert sent == pytest.approx(expected, rel=0.01, abs=ON_READING)


@pytest.mark.full
@ALL
def test_peak(number: int, planned_on_cpu: list[dict[str, Any]], real: list[dict[str, Any]]) -> None:
    """The most that a step holds beside the states: activations, gradients and temporary tensors."""
    assert planned_on_cpu[number]["most"] == pytest.approx(real[number]["most"], rel=0.1)


def among_several(sent: dict[str, int]) -> dict[str, int]:
    """Return the bytes without those of groups of one rank."""
    return {name: size for name, size in sent.items() if not name.endswith(" of 1")}
