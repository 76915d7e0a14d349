"""The pretended device notices what is planted, and nothing else: each check of check_device.py."""

import pytest

from tests.cuda.runs import library_or_skip
from tests.support.in_subprocess import names_of_checks, verdicts_of

CHECKS = names_of_checks("tests/cuda/check_device.py")


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    library_or_skip()
    return verdicts_of("tests.cuda.check_device", CHECKS, request, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("check", CHECKS)
def test_the_device(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""
