"""When W&B sends an alert: divergence, dead experts, stalls."""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

WINDOW = 20  # logged steps, for the usual duration of a step
STALL = 5.0  # times that duration
DIVERGED = 1.5  # times the lowest loss


@dataclass(frozen=True)
class Alert:
    """title: its kind, by which W&B limits how often it is sent. text: what was found."""

    title: str
    text: str


class Alerts:
    """Judges the metrics of each logged step, in their order; each kind at most once until it has ended."""

    def __init__(self) -> None:
        self._lowest = math.inf
        self._dead = 0
        self._diverged = False
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def of(self, metrics: dict[str, Any]) -> list[Alert]:
        """Return the alerts that a step's metrics (by their names in metrics.jsonl) give rise to."""
        where = f"step {metrics['step']}: "
        found = (self._divergence(metrics), self._dead_experts(metrics), self._stall(metrics))
        return [Alert(alert.title, where + alert.text) for alert in found if alert is not None]

    def _divergence(self, metrics: dict[str, Any]) -> Alert | None:
        loss = metrics.get("train/lm_loss")
        if loss is None:
            return None
        before, self._diverged = self._diverged, not loss <= DIVERGED * self._lowest
        if math.isfinite(loss):
            self._lowest = min(self._lowest, loss)
        else:
            self._diverged = True
        text = f"train/lm_loss is {loss:.4g}, the lowest so far was {self._lowest:.4g}"
        return Alert("divergence", text) if self._diverged and not before else None

    def _dead_experts(self, metrics: dict[str, Any]) -> Alert | None:
        before, self._dead = self._dead, int(metrics.get("moe/dead", self._dead))
        if self._dead <= before:
            return None
        return Alert("dead experts", f"{self._dead} experts get no token, {before} before")

    def _stall(self, metrics: dict[str, Any]) -> Alert | None:
        seconds = metrics.get("perf/step_s")
        if seconds is None:
            return None
        usual = statistics.median(self._seconds) if len(self._seconds) == WINDOW else math.inf
        self._seconds.append(seconds)
        if seconds <= STALL * usual:
            return None
        return Alert("stall", f"the step took {seconds:.3g} s, usual are {usual:.3g} s")
