"""Triton's passes over rows, in its interpreter: on_interpreter.py. No GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.on_interpreter import CHECKS

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = list(CHECKS)
LONG = ("all_outputs_and_gradients_are_those_of_float64", "outputs_and_gradients_are_the_plain_ones")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_checks(checks: list[str], **variables: str) -> dict[str, str]:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.on_interpreter", *checks],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    names = [item.name for item in request.session.items]
    asked = [check for check in INTERPRETED if any(f"[{check}]" in name for name in names)]
    return run_checks(asked, TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=pytest.mark.full if check in LONG else ()) for check in INTERPRETED]
)
def test_in_the_interpreter(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""
