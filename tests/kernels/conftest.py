"""The compiled library, two threads, and the choice of kernels back at the default after each test."""

from collections.abc import Iterator

import pytest
import torch

from megamoe.kernels.library import Library, find_library
from tests.kernels.chosen import use_compiled


@pytest.fixture(autouse=True)
def _choice_restored() -> Iterator[None]:
    use_compiled(True)
    yield
    use_compiled(True)


@pytest.fixture
def library() -> Library:
    found, problem = find_library()
    if found is None:
        pytest.skip(f"no compiled kernels: {problem}")
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    """PyTorch's number of threads during the test, by which the kernels divide their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
