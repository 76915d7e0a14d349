"""Ranks for tests: imports are done once a session, and a world costs half a second."""

import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from megamoe.apps.verify.ranks import RankError as RankError
from megamoe.apps.verify.ranks import RankPool

PRELOAD = "tests.support.ranks.preload"


class Pool(RankPool):
    """Ranks on this machine's CPUs. A job that needs more than `most_ranks` skips its test."""

    def __init__(self, most_ranks: int = 64) -> None:
        self._most_ranks = most_ranks
        super().__init__(preload=PRELOAD)

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int, timeout_s: float = 120, **kwargs: Any
    ) -> list[Any]:
        """See `RankPool`. Results travel by plain pickle: tensors would else be files of the rank."""
        if ranks > self._most_ranks:
            pytest.skip(f"{ranks} ranks, at most {self._most_ranks} were asked for")
        log = kwargs.pop("log", None)
        job = pickle.dumps((function, args, kwargs))
        return list(map(pickle.loads, super().run(_run, job, ranks=ranks, timeout_s=timeout_s, log=log)))


def _run(job: bytes) -> bytes:
    importlib.import_module(PRELOAD)  # usually done; the fork server ignores a failed import
    function, args, kwargs = pickle.loads(job)
    return pickle.dumps(function(*args, **kwargs))
