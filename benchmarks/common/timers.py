"""How long the calls of a few methods take, without a hook in what they call."""

import time
from collections import defaultdict
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")  # where the benchmarks compute


def clock() -> float:
    """Return the time in seconds; with a GPU, once all work queued on it is done."""
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class Timers:
    """The seconds of all calls by name, since they were last taken."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: object, method: str, name: str) -> None:
        """Time every call of a method of this one object, from now on."""
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += clock() - started

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Return what was counted; from here on it is counted anew."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken
