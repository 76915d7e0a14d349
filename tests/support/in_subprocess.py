"""Checks that run in a separate process, which reports the result of each."""

import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def checks_of(names: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """Return a module's functions named check_..., by the rest of their names."""
    return {name.removeprefix("check_"): check for name, check in names.items() if name.startswith("check_")}


def names_of_checks(*modules: str) -> list[str]:
    """Return the names that `checks_of` gives the checks of these files, without importing them."""
    return [
        name
        for module in modules
        for name in re.findall(r"^def check_(\w+)\(", (ROOT / module).read_text(), flags=re.MULTILINE)
    ]


def run_checks(checks: Mapping[str, Callable[[], None]]) -> str:
    """Run the checks that the command line names; return JSON with each one's traceback, empty if it
    passed.
    """
    verdicts = {}
    for name in sys.argv[1:]:
        verdicts[name] = ""
        try:
            checks[name]()
        except Exception:
            verdicts[name] = traceback.format_exc()
    return json.dumps(verdicts)


def output_of(module: str, *arguments: str, **variables: str) -> Any:
    """Run a module of the tests in a process of its own; return what it prints as JSON in its last line."""
    # A world of this process, of another test, has its variables here.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=ROOT,
        env={**outside, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def verdicts_of(
    module: str, checks: Iterable[str], request: pytest.FixtureRequest, **variables: str
) -> dict[str, str]:
    """Run the checks of a module that tests of this session ask for; return each one's traceback."""
    names = [item.name for item in request.session.items]
    asked = [check for check in checks if any(f"[{check}]" in name for name in names)]
    return dict(output_of(module, *asked, **variables))


def needs_fake_device() -> None:
    """Skip the test where the fake CUDA device cannot be made."""
    import torch  # not in a process of checks, which makes the device before

    if not shutil.which("g++"):
        pytest.skip("no g++ to build the fake CUDA device")
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("PyTorch is built with CUDA, and there is no CUDA device")
