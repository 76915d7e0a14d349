"""The pretended device notices what is planted, and nothing else: each check of check_device.py."""

import pytest

from tests.cuda.pretended import shown_path
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


@pytest.mark.parametrize(
    "root", ["/src/megamoe", "/src/tests", "/a b/megamoe/tests/megamoe", "/src/deepspeed/x"]
)
def test_places_are_relative_to_the_checkout_whatever_its_folders_name(root: str) -> None:
    assert shown_path(f"{root}/tests/cuda/check_device.py", root) == "tests/cuda/check_device.py"
    assert shown_path(f"{root}/megamoe/moe/layer.py", root) == "megamoe/moe/layer.py"
    installed = f"{root}/.venv/lib/python3.11/site-packages"
    assert shown_path(f"{installed}/deepspeed/runtime/engine.py", root) == "deepspeed/runtime/engine.py"
    assert shown_path(f"{installed}/torch/nn/modules/module.py", root) is None
    assert shown_path("/usr/lib/python3.11/contextlib.py", root) is None
