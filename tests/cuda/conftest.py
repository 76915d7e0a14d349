"""The pool of ranks on the CPU, with which runs on the pretended device are compared."""

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Runs jobs on processes that are the ranks."""
    return Pool()
