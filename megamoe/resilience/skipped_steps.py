"""Which steps are not applied: what is not finite, and a loss far above those before it.

The rule of the loss spike is that of OLMo 2's optimiser (OLMo-core, SkipStepOptimizer: 6 standard deviations
over 128 steps), and does at once what PaLM's authors did by hand: go back, and leave the batches of a spike
out (Chowdhery et al. 2022, section 5.1).
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megamoe.config.schema import TrainConfig

MOST_TOLD = 8  # micro batches whose samples a message names


@dataclass(frozen=True)
class Problem:
    """Why a step is not applied. ends: the run ends with it; counts: in train.max_skipped_in_a_row."""

    what: str
    ends: bool = False
    counts: bool = True


class SkipPolicy:
    """Judges every step's loss, and knows how many steps in a row were skipped.

    in_a_row: since the last applied step, of the problems that count.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.spike = config.loss_spike
        self.most_in_a_row = config.max_skipped_in_a_row
        self.in_a_row = 0
        self._losses: deque[float] = deque(maxlen=self.spike.window)  # of applied steps, where the rule is on

    def judge(self, lm_loss: float, loss: float) -> Problem | None:
        """Of the global batch, before the optimiser's step; None: it is to be taken."""
        for name, value in (("train/lm_loss", lm_loss), ("train/loss", loss)):
            if not math.isfinite(value):
                return Problem(f"{name} is {value}")
        limit = self.limit()
        if limit is None or lm_loss <= limit:
            return None
        return Problem(
            f"train/lm_loss is {lm_loss:.4f}, above {limit:.4f}, the mean of the last {self.spike.window} "
            f"applied steps + {self.spike.sigmas:g} standard deviations (train.loss_spike)",
            ends=self.spike.action == "stop",
        )

    def limit(self) -> float | None:
        """The largest loss that is no spike; None while the window is not full, or the rule is off."""
        if self.spike.sigmas is None or len(self._losses) < self.spike.window:
            return None
        mean = statistics.fmean(self._losses)
        return mean + self.spike.sigmas * statistics.stdev(self._losses, mean)

    def note(self, problem: Problem | None, lm_loss: float) -> None:
        """Take in what became of the step."""
        if problem is not None:
            self.in_a_row += problem.counts
            return
        self.in_a_row = 0
        if self.spike.sigmas is not None:
            self._losses.append(lm_loss)

    def reason_to_end(self, problem: Problem) -> str | None:
        """After `note`: why the run ends with this step, if it does."""
        if problem.ends:
            return "train.loss_spike.action is stop"
        if not problem.counts or self.in_a_row < self.most_in_a_row:
            return None
        return f"{self.in_a_row} skipped in a row (train.max_skipped_in_a_row)"

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as plain data."""
        return {"in_a_row": self.in_a_row, "losses": list(self._losses)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, under another window with the newest losses that it takes."""
        self.in_a_row = state.get("in_a_row", 0)
        self._losses = deque(state.get("losses", []), maxlen=self.spike.window)


def name_samples(found: dict[int, dict[int, list[int]]]) -> str:
    """found: by rank, the samples that are not finite, by their micro batch's place on that rank."""
    told = [
        f"{', '.join(map(str, samples))} (rank {rank}, micro batch {place + 1})"
        for rank, places in found.items()
        for place, samples in sorted(places.items())
    ]
    more = f" and those of {len(told) - MOST_TOLD} more micro batches" if len(told) > MOST_TOLD else ""
    return f"; not finite: {'; '.join(told[:MOST_TOLD])}{more}" if told else ""
