"""Launches of Triton's kernels by `compat.triton_launch`: those that Triton makes, to the last argument."""

import importlib.util

import pytest

from tests.support.in_subprocess import names_of_checks, output_of

FILE = "tests/support/kernels/triton_launches.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    return output_of("tests.support.kernels.triton_launches", *names_of_checks(FILE))


@pytest.mark.parametrize("check", names_of_checks(FILE))
def test_launches_as_triton_does(check: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[check], verdicts[check]
