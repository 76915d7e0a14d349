"""The time of the stages of the MoE layers' forward passes, without a wait of the host on a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("route", "dispatch", "experts", "combine")


class StageTimers:
    """Adds up the seconds of each stage over the layers and micro batches of a step, on this rank.

    On CUDA a stage lies between two events on the current stream; `seconds` may be read when the host has
    waited for the stream anyway. Collectives on other streams count where the current stream waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what runs inside under this name, one of STAGES."""
        if self._on_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Return the sums since the last call, and begin anew."""
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000
        self._events.clear()
        found, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return found
