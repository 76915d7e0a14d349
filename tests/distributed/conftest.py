"""The pool of ranks, shared by all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes; started when a test first runs something on them."""
    workers = Pool()
    yield workers
    workers.stop()
