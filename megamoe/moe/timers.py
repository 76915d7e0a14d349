"""Times of training on this rank, without a wait of the host on a GPU: of stages, and of its own work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Mark = Any  # float, in seconds, or torch.cuda.Event
STAGES = ("route", "dispatch", "experts", "combine")


class StageTimers:
    """Adds up the seconds of each stage over the layers and micro batches of a step, on this rank.

    On CUDA a stage lies between two events on the current stream; `seconds` may be read when the host has
    waited for the stream anyway. Collectives on other streams count where the current stream waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[str, Mark, Mark]] = []  # name, begin and end of each
        self._now: tuple[str, Mark] | None = None  # the stage that is measured, and its begin

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what runs inside under this name, one of STAGES."""
        self.resume(name)
        yield
        self.pause()

    def pause(self) -> str | None:
        """Stop measuring; return the stage for `resume`, None if there is none."""
        if self._now is None:
            return None
        (name, begin), self._now = self._now, None
        self._parts.append((name, begin, _mark(self._device)))
        return name

    def resume(self, name: str | None) -> None:
        """Go on with a stage."""
        self._now = None if name is None else (name, _mark(self._device))

    def seconds(self) -> dict[str, float]:
        """Return the sums since the last call, and begin anew."""
        found = dict.fromkeys(STAGES, 0.0)
        for name, begin, end in self._parts:
            found[name] += _between(begin, end)
        self._parts.clear()
        return found


class LocalComputeTimer:
    """The time that this rank takes for its own work at the beginning of a step.

    It goes from `begin` to `end`, which is the end of the first micro batch's forward pass, without the parts
    between `pause` and `resume`: there the MoE layers send rows and counts to other ranks and wait for
    theirs, and compute the experts, whose time depends on the router. What is left is the same work on every
    rank: reading data, attention, dense and shared FFNs, routers, the head. The collectives in it, of tensor
    parallelism and ZeRO 3, even out the times of the ranks that wait for each other.

    On CUDA the parts lie between events on the current stream. They are read at the next `begin`, when the
    host has waited for the step's sums. Before the first `begin` nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Mark] = []  # begins and ends of the parts, in turn
        self._active = False
        self.seconds = 0.0  # of the last step that is over; 0: none was measured

    def begin(self) -> None:
        """Begin a step."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=False)
        self.seconds = sum(_between(begin, end) for begin, end in pairs)
        self._marks.clear()
        self._active = True
        self._marks.append(_mark(self._device))

    def pause(self) -> None:
        """Stop until `resume`; nothing after `end`."""
        if self._active:
            self._marks.append(_mark(self._device))

    def resume(self) -> None:
        """Go on after `pause`; nothing after `end`."""
        self.pause()  # the marks alternate: ends and begins of the measured parts

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside: a wait for other ranks."""
        self.pause()
        yield
        self.resume()

    def end(self) -> None:
        """End the measurement of this step; nothing if it has ended."""
        self.pause()
        self._active = False


def _mark(device: torch.device) -> Mark:
    """Return this moment: on CUDA, an event on the current stream; otherwise seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks of one device."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
