"""Times of training on this rank, without a wait of the host on a GPU: of stages, and of its own work."""

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


class OwnTime:
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
        self._on_cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []  # begins and ends of the parts, in turn
        self._active = False
        self.seconds = 0.0  # of the last step that is over; 0: none was measured

    def begin(self) -> None:
        """Begin a step."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=False)
        self.seconds = sum(_between(begin, end) for begin, end in pairs)
        self._marks.clear()
        self._active = True
        self._mark()

    def pause(self) -> None:
        """Stop until `resume`; nothing after `end`."""
        if self._active:
            self._mark()

    resume = pause

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

    def _mark(self) -> None:
        if not self._on_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)


def _between(begin: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    """Return the seconds between two marks."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin
    return begin.elapsed_time(end) / 1000
