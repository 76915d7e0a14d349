"""What each part refuses in one line, of its options and of the parts beside it, and what it accepts."""

from collections.abc import Callable

import pytest

from tests.support.refusals import Case, cases, refusal


@pytest.mark.parametrize("case", cases("moe"))
def test_what_each_part_is_told(case: Case, expect_message: Callable[..., None]) -> None:
    """By its options alone while the YAML is read, and beside other parts before anything is built."""
    expect_message(case, refusal(case.row))
