"""The kernels are tested with two threads, as each of them divides its work among threads."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
