"""What was logged as a warning, which pytest's own plugin would collect at the cost of all other tests."""

import logging
from collections.abc import Iterator

import pytest


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged_warnings() -> Iterator[list[logging.LogRecord]]:
    """The records of all loggers, from warnings on."""
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    yield kept.records
    logging.getLogger().removeHandler(kept)
