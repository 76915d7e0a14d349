"""Records a window of steps with torch.profiler."""

from pathlib import Path
from typing import Any

import torch

from megamoe.config.schema import ProfilerConfig
from megamoe.errors import UserError


class ProfilerWindow:
    """Records steps `start_step` to `start_step + num_steps - 1` of this rank as a Chrome trace."""

    def __init__(self, config: ProfilerConfig, folder: Path, rank: int) -> None:
        self._config = config
        self._path = folder / f"rank_{rank:05d}.json"
        self._profiler: Any = None

    def before_step(self, step: int) -> None:
        """Start recording if `step` (from 1) is the first of the window."""
        if step != self._config.start_step:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def after_step(self, step: int) -> Path | None:
        """Write the trace if `step` was the last of the window; return its path."""
        if step < (self._config.start_step or 0) + self._config.num_steps - 1:
            return None
        return self.finish()

    def finish(self) -> Path | None:
        """Write the trace if the run ended inside the window; return its path."""
        if self._profiler is None:
            return None
        self._profiler.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
        except OSError as error:
            raise UserError(f"train.profiler: cannot write {self._path}: {error.strerror}") from None
        self._profiler = None
        return self._path
