"""The pretended device notices what is planted, and nothing else: each check of check_device.py."""

import json
import os
import subprocess
import sys

import pytest

from tests.cuda.check_device import CHECKS
from tests.cuda.runs import ROOT, library_or_skip


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    library_or_skip()
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda.check_device", *CHECKS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout.splitlines()[-1]))


@pytest.mark.parametrize("check", CHECKS)
def test_the_device(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""
