"""The memory of a fake device over time, by category and part, from what is allocated and freed."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from megamoe.apps.plan.fake_cuda import storage_key

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARY, BATCH = "activations", "temporary", "batch and counts"


@dataclass
class Allocation:
    """One piece of memory. category: as it was first allocated, or what `MemoryTimeline.name` made of it."""

    bytes: int
    category: str
    part: str


@dataclass(frozen=True)
class Peak:
    """The most bytes that were allocated at one time, in all, by category, and of activations by part."""

    bytes: int
    by_category: dict[str, int]
    activations_by_part: dict[str, int]


class MemoryTimeline:
    """Every allocation of the fake device in order. What shares memory, such as a view, is one allocation.

    Bytes are those of the tensors: the rounding and the fragmentation of a real allocator are not included.
    """

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self._events: list[tuple[int, int]] = []  # (allocation, +1 or -1)
        self._live: dict[int, int] = {}  # by storage
        self._mark = 0
        self._forward = 0
        self._phases: list[tuple[int, str]] = [(0, "start")]  # (number of events before it, its name)

    def add(self, tensor: Tensor, category: str, part: str) -> None:
        """Take in a tensor, if its memory is new."""
        key = storage_key(tensor)
        if key in self._live:
            return
        number = self._live[key] = len(self.allocations)
        storage = tensor.untyped_storage()
        self.allocations.append(Allocation(storage.nbytes(), category, part))
        self._events.append((number, 1))
        finalizer = weakref.finalize(storage, self._free, key, number)
        finalizer.atexit = False

    def _free(self, key: int, number: int) -> None:
        if self._live.get(key) == number:
            del self._live[key]
            self._events.append((number, -1))

    def name(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what the memory of these tensors is, from its allocation on."""
        for tensor in tensors:
            number = self._live.get(storage_key(tensor))
            if number is not None:
                self.allocations[number].category = category

    def name_rest(self, category: str, of: str) -> None:
        """Say of all live memory of category `of` that it is of another."""
        for number in self._live.values():
            if self.allocations[number].category == of:
                self.allocations[number].category = category

    def end_forward(self) -> None:
        """What the forward pass has freed by now was not kept for the backward pass: temporary."""
        live = set(self._live.values())
        for number, allocation in enumerate(self.allocations):
            if allocation.category == ACTIVATIONS and number not in live and number >= self._forward:
                allocation.category = TEMPORARY
        self._forward = len(self.allocations)

    def live_bytes(self, category: str) -> int:
        """Bytes of a category now."""
        live = (self.allocations[number] for number in self._live.values())
        return sum(each.bytes for each in live if each.category == category)

    def start(self) -> None:
        """Look for the peak from here on."""
        self._mark = len(self._events)

    def begin_phase(self, name: str) -> None:
        """What is allocated and freed from here on belongs to a phase of the step."""
        self._phases.append((len(self._events), name))

    def peaks_by_phase(self) -> dict[str, Peak]:
        """Since `start`: the peak within each phase, over all its parts."""
        best: dict[str, tuple[int, int]] = {}  # by phase: bytes, and the number of events until then
        total, phase, name = 0, 0, ""
        for place, (number, change) in enumerate(self._events, start=1):
            total += change * self.allocations[number].bytes
            while phase < len(self._phases) and self._phases[phase][0] < place:
                name = self._phases[phase][1]
                phase += 1
            if place >= self._mark and total > best.get(name, (0, 0))[0]:
                best[name] = total, place
        return {name: self._peak_at(size, place) for name, (size, place) in best.items()}

    def _peak_at(self, best: int, at: int) -> Peak:
        held: set[int] = set()
        for number, change in self._events[:at]:
            (held.add if change > 0 else held.discard)(number)
        by_category: Counter[str] = Counter()
        by_part: Counter[str] = Counter()
        for number in held:
            allocation = self.allocations[number]
            by_category[allocation.category] += allocation.bytes
            if allocation.category == ACTIVATIONS:
                by_part[allocation.part] += allocation.bytes
        return Peak(best, dict(by_category), dict(by_part))
