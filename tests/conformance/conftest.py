"""The fixture that plants a test's defect."""

from collections.abc import Iterator

import pytest

from tests.conformance.planting import planted


@pytest.fixture(autouse=True)
def defect(request: pytest.FixtureRequest) -> Iterator[None]:
    """The edits of `fails_with` are planted during the test."""
    with planted(*getattr(request, "param", ())):
        yield
