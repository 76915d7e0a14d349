"""Canaries: what compat.fake_cuda uses and patches is as it was, and is still needed (check_fake_cuda.py)."""

import shutil

import pytest
import torch

from tests.support.in_subprocess import names_of_checks, verdicts_of

CHECKS = names_of_checks("tests/compat/check_fake_cuda.py")


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    if not shutil.which("g++"):
        pytest.skip("no g++ to build the fake CUDA device")
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("PyTorch is built with CUDA, and there is no CUDA device")
    return verdicts_of("tests.compat.check_fake_cuda", CHECKS, request)


@pytest.mark.parametrize("check", CHECKS)
def test_in_a_process_with_the_device(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""
