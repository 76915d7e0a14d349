"""What takes steps, and what is measured of each."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    data: fetching the batch. optimizer: norm, clipping, update, gradients cleared; update: its own part.
    """

    data: float
    forward: float
    backward: float
    optimizer: float
    update: float
    total: float

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def rest(self) -> float:
        """Everything else: masks, sums over ranks, records."""
        return self.total - self.data - self.both - self.optimizer


class Candidate(Protocol):
    """A model and its optimiser. parameters: of the model; updated: those that this process steps on."""

    parameters: int
    updated: int

    def step(self, number: int) -> StepTime:
        """Take one; its number counts from 0."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...
