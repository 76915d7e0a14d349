"""Canaries: what the fake CUDA device uses and patches is as it was, and is needed (check_fake_cuda.py)."""

import pytest

from tests.support.in_subprocess import names_of_checks, needs_fake_device, verdicts_of

CHECKS = names_of_checks("tests/compat/check_fake_cuda.py")


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    needs_fake_device()
    return verdicts_of("tests.compat.check_fake_cuda", CHECKS, request)


@pytest.mark.parametrize("check", CHECKS)
def test_in_a_process_with_the_device(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""
