"""When a launch stops before its last step: after a number of steps or minutes, or on a signal."""

import signal
import time
from types import FrameType

from megamoe.config.schema import TrainConfig

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRule:
    """Decides once a step whether to stop: every rank votes, and all follow the largest vote.

    started: when the launch did, by `time.monotonic`; None: now. by_signal: all ranks stop because of one.
    """

    def __init__(self, train: TrainConfig, started: float | None = None) -> None:
        self._steps = train.exit_after_steps
        self._minutes = train.exit_after_minutes
        self._started = time.monotonic() if started is None else started
        self._done = 0
        self._signal: int | None = None
        self.by_signal = False

    def listen(self) -> None:
        """From now on SIGTERM and SIGUSR1 make the run save after its step and end.

        Before, they end it at once.
        """
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def step_done(self) -> None:
        """Count a step of this launch."""
        self._done += 1

    @property
    def signalled(self) -> bool:
        """Whether this rank has received a signal to stop."""
        return self._signal is not None

    def reason(self) -> str | None:
        """Return why to stop now, or None."""
        if self._signal is not None:
            return f"signal {signal.Signals(self._signal).name}"
        if self._steps is not None and self._done >= self._steps:
            return f"train.exit_after_steps {self._steps}"
        if self._minutes is not None and time.monotonic() - self._started >= 60 * self._minutes:
            return self._planned
        return None

    def vote(self) -> float:
        """Return 0 to go on, 1 to stop as planned, 2 to stop by a signal, which takes precedence."""
        return 2.0 if self.signalled else float(self.reason() is not None)

    def agree(self, largest_vote: float) -> str | None:
        """Return the reason to stop, or None, from the largest vote of all ranks."""
        self.by_signal = largest_vote == 2
        if not largest_vote:
            return None
        return self.reason() or ("another rank received a signal" if self.by_signal else self._planned)

    @property
    def _planned(self) -> str:
        """Why to stop when the minutes are over, on this rank or another."""
        return f"train.exit_after_minutes {self._minutes:g}"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
