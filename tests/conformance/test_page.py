"""docs/change/conformance.md lists each defect, its test and reports. An edit that no longer fits is told."""

import re
from pathlib import Path

import pytest

from tests.conformance import vendors, vendors_second
from tests.conformance.listed import HERE, Listed, listed
from tests.conformance.planting import Edit, planted

PAGE = Path(__file__).parents[2] / "docs/change/conformance.md"


def test_the_page_has_every_defect() -> None:
    page, defects = PAGE.read_text(encoding="utf-8"), list(listed())
    assert len(defects) >= 60
    assert [each.name for each in defects if each.row() not in page] == []
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", number) for each in defects for number in each.reports)


def test_the_page_has_what_the_vendors_do() -> None:
    page, names = PAGE.read_text(encoding="utf-8"), {each.name for each in listed()}
    asked = [*vendors.ANSWERS, *vendors_second.ANSWERS]
    assert [name for name in asked if name not in names or f"\n| `{name}` |" not in page] == []


def test_every_test_here_has_a_defect() -> None:
    """No test of this folder but those of this file goes without."""
    written = [
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.name != Path(__file__).name
    ]
    assert sorted(written) == sorted(each.name for each in listed())


@pytest.mark.parametrize("planted_defect", list(listed()), ids=lambda each: each.name)
def test_every_defect_can_be_planted(planted_defect: Listed) -> None:
    """The texts of its edits are in the sources, and change functions: `planted` refuses them otherwise."""
    with planted(*planted_defect.edits):
        pass


def test_an_edit_that_does_not_fit_is_told() -> None:
    module = "tests.conformance.listed"
    for before, message in (
        ("nowhere to be found", "found it 0 times"),
        ('"Reported: "', "change no function"),
    ):
        with pytest.raises(ValueError, match=message), planted(Edit(module, before, '"x"')):
            pass


def test_a_planted_edit_is_gone_afterwards() -> None:
    edit = Edit("tests.conformance.listed", "if not reports:", "if True:")
    with planted(edit), pytest.raises(ValueError, match="expected a docstring"):
        list(listed())
    assert list(listed())
