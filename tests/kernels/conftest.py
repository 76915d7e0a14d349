"""The compiled library, two threads; the choice of kernels and the threads are restored after each test."""

from collections.abc import Iterator

import pytest
import torch

from megamoe.kernels.library import Library, find_library
from tests.support.kernels.chosen import use_compiled


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    use_compiled(True)
    yield
    use_compiled(True)
    torch.set_num_threads(threads)


@pytest.fixture(params=[True, False])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Both choices of kernels: the compiled library, and PyTorch's operators."""
    use_compiled(request.param)
    return bool(request.param)


@pytest.fixture
def library() -> Library:
    found, problem = find_library()
    if found is None:
        pytest.skip(f"no compiled kernels: {problem}")
    return found


@pytest.fixture
def two_threads() -> None:
    """PyTorch's number of threads during the test, by which the kernels divide their work."""
    torch.set_num_threads(2)
