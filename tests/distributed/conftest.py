"""The pool of ranks, shared by all tests of this folder."""

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Runs jobs on processes that are the ranks."""
    return Pool()
