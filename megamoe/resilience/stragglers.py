"""Stragglers: ranks that take longer than the others for the same work, named while the run trains.

Each rank measures the time of its local work in a step (`megamoe.moe.timers.LocalComputeTimer`), and the sums
of the step carry the times of all ranks. A rank is named when its median over a window of steps exceeds the
median of the ranks of its pipeline stage by a factor, in IN_A_ROW windows. Stages have different work, so a
stage of one rank has nothing to be compared with.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megamoe.io import replace_file
from megamoe.metrics import names

STRAGGLERS = "stragglers.json"  # in the run's folder, while there are any
STEPS = 10  # of a window, at least; a multiple of log.every
IN_A_ROW = 3


class Stragglers:
    """The judgement of the first rank.

    Args:
        factor: over the median of the ranks.
        every: steps between two records of the metrics.
        hosts: of each rank.
        folder: of the run, for STRAGGLERS.
        stage_ranks: the number of ranks of a pipeline stage, which are consecutive; None: all.
    """

    def __init__(
        self, factor: float, every: int, hosts: list[str], folder: Path, stage_ranks: int | None = None
    ) -> None:
        self._factor, self._hosts, self._path = factor, hosts, folder / STRAGGLERS
        self._stage_ranks = len(hosts) if stage_ranks is None else stage_ranks
        self._steps = every * -(-STEPS // every)
        self._seconds_SR: list[list[float]] = []
        self._slow_windows_R = np.zeros(len(hosts), dtype=np.int64)
        self._named: list[int] = []
        self.metrics: dict[str, Any] = {}  # of the last window
        with suppress(OSError):
            self._path.unlink(missing_ok=True)  # an earlier launch's

    def add(self, seconds_R: list[float]) -> list[str]:
        """Take in the ranks' own times of a step; return lines that say who is slow, or no longer is.

        Times of 0 were not measured; such a step does not count.
        """
        if len(seconds_R) < 2 or min(seconds_R) <= 0:
            return []
        self._seconds_SR.append(seconds_R)
        if len(self._seconds_SR) < self._steps:
            return []
        own_R = np.median(self._seconds_SR, axis=0)
        self._seconds_SR = []
        stages = np.split(own_R, range(self._stage_ranks, len(own_R), self._stage_ranks))
        of_stage_R = np.concatenate([np.full(len(each), _middle(each)) for each in stages])
        slow_R = own_R > self._factor * of_stage_R
        self._slow_windows_R = np.where(slow_R, self._slow_windows_R + 1, 0)
        before, self._named = self._named, np.flatnonzero(self._slow_windows_R >= IN_A_ROW).tolist()
        slowest = int((own_R / of_stage_R).argmax())
        self.metrics = {
            names.OWN_S: _middle(own_R),
            names.SLOWEST_OWN_S: float(own_R[slowest]),
            names.SLOWEST_RANK: slowest,
            names.STRAGGLERS: len(self._named),
        }
        if before != self._named:
            self._write(own_R / of_stage_R)
        new, ended = set(self._named) - set(before), set(before) - set(self._named)
        lines = [self._line(rank, float(own_R[rank]), float(of_stage_R[rank])) for rank in sorted(new)]
        return lines + [f"rank {rank} on {self._hosts[rank]} is no longer slow" for rank in sorted(ended)]

    def _line(self, rank: int, own_s: float, middle: float) -> str:
        stage = ""
        if self._stage_ranks < len(self._hosts):
            stage = f" of pipeline stage {rank // self._stage_ranks}"
        return (
            f"straggler: for {IN_A_ROW * self._steps} steps, rank {rank}{stage} on {self._hosts[rank]} took "
            f"{own_s / middle:.1f} times the ranks' median for its own work at the beginning of a step "
            f"({own_s:.3g} s and {middle:.3g} s)"
        )

    def _write(self, times_R: "np.ndarray") -> None:
        found = [
            {"rank": rank, "host": self._hosts[rank], "times": round(float(times_R[rank]), 2)}
            for rank in self._named
        ]
        with suppress(OSError):  # as of the other files that tell how a launch is
            if found:
                replace_file(self._path, json.dumps({"ranks": found}).encode())
            else:
                self._path.unlink(missing_ok=True)


def _middle(seconds_R: "np.ndarray") -> float:
    """Return the median; of two, the faster one."""
    return float(np.sort(seconds_R)[(len(seconds_R) - 1) // 2])
