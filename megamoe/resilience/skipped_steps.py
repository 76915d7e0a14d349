"""Which steps are skipped: those with a non-finite loss or gradient, and those with a loss spike.

The rule for spikes is that of OLMo 2's optimiser (OLMo-core, SkipStepOptimizer: 6 standard deviations over
128 steps). PaLM's authors did the same by hand: they went back and left out the batches of the spike
(Chowdhery et al. 2022, section 5.1).
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megamoe.config.schema import TrainConfig
from megamoe.metrics import names

MAX_NAMED = 8  # micro batches whose samples a message names


@dataclass(frozen=True)
class Problem:
    """Why a step is skipped. ends: it ends the run. counts: train.max_skipped_in_a_row counts it."""

    what: str
    ends: bool = False
    counts: bool = True


class SkipPolicy:
    """Decides which steps are skipped, and counts skipped steps in a row.

    in_a_row: the number of problems that count since the last applied step.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.spike = config.loss_spike
        self.most_in_a_row = config.max_skipped_in_a_row
        self.in_a_row = 0
        self._losses: deque[float] = deque(maxlen=self.spike.window)  # of applied steps, where the rule is on

    def reason_to_skip(self, lm_loss: float, loss: float) -> Problem | None:
        """Return why the step must be skipped, or None.

        The losses are the global batch's, before the optimiser's step.
        """
        for name, value in ((names.LM_LOSS, lm_loss), (names.LOSS, loss)):
            if not math.isfinite(value):
                return Problem(f"{name} is {value}")
        limit = self.limit()
        if limit is None or lm_loss <= limit:
            return None
        return Problem(
            f"{names.LM_LOSS} is {lm_loss:.4f}, above {limit:.4f}, the mean of the last {self.spike.window} "
            f"applied steps + {self.spike.sigmas:g} standard deviations (train.loss_spike)",
            ends=self.spike.action == "stop",
        )

    def limit(self) -> float | None:
        """Return the largest loss that is no spike; None until the window is full, or if the rule is off."""
        if self.spike.sigmas is None or len(self._losses) < self.spike.window:
            return None
        mean = statistics.fmean(self._losses)
        return mean + self.spike.sigmas * statistics.stdev(self._losses, mean)

    def update(self, problem: Problem | None, lm_loss: float) -> None:
        """Count a skipped step, or keep the loss of an applied one (problem: None)."""
        if problem is not None:
            self.in_a_row += problem.counts
            return
        self.in_a_row = 0
        if self.spike.sigmas is not None:
            self._losses.append(lm_loss)

    def reason_to_end(self, problem: Problem) -> str | None:
        """Return why the run must end after this step, or None. Call `update` before."""
        if problem.ends:
            return "train.loss_spike.action is stop"
        if not problem.counts or self.in_a_row < self.most_in_a_row:
            return None
        return f"{self.in_a_row} skipped in a row (train.max_skipped_in_a_row)"

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain data."""
        return {"in_a_row": self.in_a_row, "losses": list(self._losses)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state`. If the window is now shorter, the newest losses are kept."""
        self.in_a_row = state.get("in_a_row", 0)
        self._losses = deque(state.get("losses", []), maxlen=self.spike.window)


def name_samples(found: dict[int, dict[int, list[int]]]) -> str:
    """Return the text for a message that names samples. found: {rank: {micro batch: [sample, ...]}}."""
    named = [
        f"{', '.join(map(str, samples))} (rank {rank}, micro batch {place + 1})"
        for rank, places in found.items()
        for place, samples in sorted(places.items())
    ]
    more = f" and those of {len(named) - MAX_NAMED} more micro batches" if len(named) > MAX_NAMED else ""
    return f"; not finite: {'; '.join(named[:MAX_NAMED])}{more}" if named else ""
