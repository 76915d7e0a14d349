"""The pool of ranks, shared by all tests of this folder."""

import pytest

from tests.distributed.pool import Pool

_POOL = Pool()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The ranks' imports take as long as some tests: they begin with the first of any folder."""
    if not session.config.option.collectonly and any("pool" in item.fixturenames for item in session.items):
        _POOL.prepare()


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Runs jobs on processes that are the ranks."""
    return _POOL
