"""The compiled library, and a process that uses it again after each test."""

from collections.abc import Iterator

import pytest

from megamoe.kernels import library as kernels


@pytest.fixture(autouse=True)
def _choice_restored() -> Iterator[None]:
    before = kernels._Choice.compiled
    kernels.use_compiled(True)
    yield
    kernels.use_compiled(before)


@pytest.fixture
def library() -> kernels.Library:
    found, problem = kernels.find_library()
    if found is None:
        pytest.skip(f"no compiled kernels: {problem}")
    return found
