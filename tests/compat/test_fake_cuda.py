"""Canaries: what compat.fake_cuda uses and patches is as it was, and is still needed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NAMES = [
    "torch_cuda_answers",
    "modules_of_fakes",
    "constants_stay_fake",
    "operators_are_fused",
    "fake_group",
    "ranks_of_collective",
    "backward_nodes_are_found",
    "storage_key",
    "on_cuda",
    "schema",
    "unknown_sizes_raise",
    "fakes_are_drawn",
]


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """What each check found, in one process."""
    if not shutil.which("g++"):
        pytest.skip("no g++ to build the fake CUDA device")
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("PyTorch is built with CUDA, and there is no CUDA device")
    command = [sys.executable, "-W", "ignore", "-m", "tests.compat.check_fake_cuda", *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_torch_cuda_answers(verdicts: dict[str, str]) -> None:
    assert not verdicts["torch_cuda_answers"]


def test_modules_of_fakes(verdicts: dict[str, str]) -> None:
    assert not verdicts["modules_of_fakes"]


def test_constants_stay_fake(verdicts: dict[str, str]) -> None:
    assert not verdicts["constants_stay_fake"]


def test_operators_are_fused(verdicts: dict[str, str]) -> None:
    assert not verdicts["operators_are_fused"]


def test_fake_group(verdicts: dict[str, str]) -> None:
    assert not verdicts["fake_group"]


def test_ranks_of_collective(verdicts: dict[str, str]) -> None:
    assert not verdicts["ranks_of_collective"]


def test_backward_nodes_are_found(verdicts: dict[str, str]) -> None:
    assert not verdicts["backward_nodes_are_found"]


def test_storage_key(verdicts: dict[str, str]) -> None:
    assert not verdicts["storage_key"]


def test_on_cuda(verdicts: dict[str, str]) -> None:
    assert not verdicts["on_cuda"]


def test_schema(verdicts: dict[str, str]) -> None:
    assert not verdicts["schema"]


def test_unknown_sizes_raise(verdicts: dict[str, str]) -> None:
    assert not verdicts["unknown_sizes_raise"]


def test_fakes_are_drawn(verdicts: dict[str, str]) -> None:
    assert not verdicts["fakes_are_drawn"]
