"""Ranks for tests: imports are done once a session, and a world costs half a second."""

from collections.abc import Callable
from typing import Any

import pytest

from megamoe.apps.verify.ranks import RankError as RankError
from megamoe.apps.verify.ranks import RankPool


class Pool(RankPool):
    """Ranks on this machine's CPUs. A job that needs more than `most_ranks` skips its test."""

    def __init__(self, most_ranks: int = 64) -> None:
        self._most_ranks = most_ranks
        super().__init__(preload="tests.support.ranks.preload")

    def run(self, function: Callable[..., Any], *args: Any, ranks: int, **options: Any) -> list[Any]:
        """See `RankPool`."""
        if ranks > self._most_ranks:
            pytest.skip(f"{ranks} ranks, at most {self._most_ranks} were asked for")
        return super().run(function, *args, ranks=ranks, **{"timeout_s": 120, **options})
