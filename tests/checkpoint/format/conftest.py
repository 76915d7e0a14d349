"""A checkpoint written by hand, and what must not hang."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint.write(tmp_path / "run" / "checkpoints" / "step_00000007")


@pytest.fixture
def patience() -> Iterator[None]:
    """A test that hangs fails."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
