"""The simulation on fake tensors: its own counting, and that a simulated rank holds what a real one does."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megamoe.config import load_config
from megamoe.model.size import model_size
from tests.support.apps.planned_states import CASES, STATES, run_of
from tests.support.apps.planned_states import QUICK as QUICK_CASE
from tests.support.in_subprocess import names_of_checks, needs_fake_device
from tests.support.ranks.pool import Pool
from tests.support.ranks.watched import measure

ROOT = Path(__file__).parents[3]
FULL = [
    "every_kind_of_layout_is_simulated",
    "three_examples_are_planned",
    "states_of_a_layout",
    "recomputation_is_counted",
    "an_encoder_decoder_is_extrapolated",
    "command_searches",
    "steps_that_an_h100_took",
]
FILES = ("tests/support/apps/check_simulation.py", "tests/support/apps/check_command.py")
QUICK = [name for name in names_of_checks(*FILES) if name not in FULL]


def run_checks(names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Run checks in a process -> what `planned` says of a small run, and what each check found."""
    states, found = run_in_process("tests.support.apps.check_simulation", *names)
    return states, found


def run_in_process(module: str, *arguments: str) -> list[Any]:
    """Return what a module prints as JSON objects, a line each, from a process with the fake CUDA device."""
    needs_fake_device()
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def quick() -> tuple[dict[str, Any], dict[str, str]]:
    """One process for all quick checks."""
    return run_checks(QUICK)


@pytest.mark.parametrize("check", QUICK)
def test_counts(quick: tuple[dict[str, Any], dict[str, str]], check: str) -> None:
    assert not quick[1][check]


@pytest.mark.full
def test_counts_of_layouts() -> None:
    assert run_checks(FULL)[1] == dict.fromkeys(FULL, "")


def test_a_real_rank_holds_the_same_bytes(
    quick: tuple[dict[str, Any], dict[str, str]], pool: Pool, tmp_path: Path
) -> None:
    """Weights, masters, moments, gradients; distributed/costs/test_planned_states.py has more layouts."""
    ranks = CASES[QUICK_CASE][0]
    real = pool.run(measure, [run_of(QUICK_CASE, str(tmp_path))], ranks=ranks)[0][0]
    assert {name: real[name] for name in STATES} == {name: quick[0][name] for name in STATES}


@pytest.mark.parametrize(
    ("model", "vocabulary", "billions"),
    [("moe_1b", 32768, 0.93), ("mixtral_like", 32000, 46.7), ("experts_256", 65536, 29.7)],
)
def test_models_have_the_parameters_that_they_name(model: str, vocabulary: int, billions: float) -> None:
    config = load_config(str(ROOT / f"benchmarks/rooflines/models/{model}.yaml"), [])
    dense, experts = model_size(config, vocabulary).on_rank(1, 1)
    assert (dense + experts) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.full
def test_stored_figures_hold() -> None:
    """Kernels, bytes, FLOPs, peak memory, collectives and waits of the models of benchmarks/roofline.py."""
    command = [sys.executable, "-W", "ignore", "benchmarks/roofline.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
