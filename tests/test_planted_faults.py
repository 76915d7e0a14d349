"""The faults of `planted_faults.py` still fit the code. That script plants them and runs their tests."""

from pathlib import Path

import pytest

from tests.planted_faults import FAULTS, ROOT, Fault, planted
from tools.list_keys import GENERATED


def test_there_are_twenty_and_each_has_a_name_of_its_own() -> None:
    text = (ROOT / "tests/faults.yaml").read_text(encoding="utf-8")
    assert len(FAULTS) == text.count("\n  promise: ") >= 20


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_can_be_planted(fault: Fault) -> None:
    original = (ROOT / fault.file).read_text(encoding="utf-8")
    faulty = planted(fault, original)
    assert faulty != original
    if fault.file.endswith(".py"):
        compile(faulty, fault.file, "exec")  # else its tests end with an error of syntax, which is no notice
    page = ROOT / "docs" / fault.page
    assert page.is_file() or page in GENERATED.values()
    assert all(Path(ROOT / test).is_file() for test in fault.tests)


def test_an_edit_that_no_longer_fits_is_reported() -> None:
    with pytest.raises(ValueError, match=f"expected .* once in {FAULTS[0].file}, found it 0 times"):
        planted(FAULTS[0], "")
