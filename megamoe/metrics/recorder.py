"""The recorder writes each logged step's metrics to metrics.jsonl, and to TensorBoard and W&B if enabled.

metrics.jsonl is always written, and its failure (a full disk) stops the run. TensorBoard and W&B get copies.
Only one rank may open a recorder.
"""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from megamoe.config.schema import LogConfig
from megamoe.errors import UserError
from megamoe.metrics.reader import whole_lines
from megamoe.metrics.sinks.summaries import Shown, Summaries
from megamoe.metrics.sinks.tensorboard_sink import TensorBoardSink
from megamoe.metrics.sinks.wandb_sink import WandbSink

METRICS_FILE = "metrics.jsonl"
BLOCK = 1 << 20  # bytes copied at a time


class Copy(Protocol):
    """An output for metrics beside metrics.jsonl."""

    def log(self, metrics: dict[str, Any], shown: Shown) -> None:
        """Write one step. metrics: as in metrics.jsonl; shown: what is to be shown of them."""

    def close(self) -> None:
        """Write out what is pending."""


class JsonLinesSink:
    """One JSON object per line, on disk as soon as it is logged.

    JSON has no NaN and no infinities: they are written as the strings "NaN", "Infinity" and
    "-Infinity", which say what happened (null would not); `read_metrics` gives the floats back.
    """

    def __init__(self, path: Path, keep_until: int | None) -> None:
        """Append after step `keep_until`, and delete the records of later steps. None: start a new file."""
        if keep_until is not None and path.exists():
            _keep_whole(path, keep_until)
        self._file: IO[str] = path.open("w" if keep_until is None else "a", encoding="utf-8")

    def log(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(_name_non_finite(metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Recorder:
    """Hands each step's metrics to metrics.jsonl, and their summaries to W&B and TensorBoard."""

    def __init__(self, lines: JsonLinesSink, copies: list[Copy], heat_map_every: int) -> None:
        self._lines = lines
        self._copies = copies
        self._summaries = Summaries(heat_map_every)

    @classmethod
    def open(
        cls,
        run_folder: Path,
        log: LogConfig,
        run_name: str,
        config: dict[str, Any],
        resumed_step: int | None,
    ) -> "Recorder":
        """Open the sinks that `log` names, in `run_folder`, which is made if it is missing.

        A resumed run continues its W&B run and its files, without the records of steps after `resumed_step`,
        which it repeats. Any other run (None) starts new ones.

        Raises:
            UserError: if TensorBoard is wanted and its package is missing, or if a resumed run's record has a
                broken line (`check_record`).
        """
        run_folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard comes first: it alone may raise, and then no existing file has been replaced.
        copies: list[Copy] = [TensorBoardSink(run_folder / "tensorboard")] if log.tensorboard else []
        if log.wandb.enabled:
            repeats = None if resumed_step is None else _repeats(run_folder / METRICS_FILE, resumed_step)
            copies.append(WandbSink(run_folder, log.wandb, run_name, config, repeats))
        return cls(JsonLinesSink(run_folder / METRICS_FILE, resumed_step), copies, log.heat_map_every)

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one step. Values: numbers, lists of numbers, and anything with `.tolist()`."""
        plain = {key: _to_plain(value) for key, value in metrics.items()}
        self._lines.log(plain)
        if self._copies:
            shown = self._summaries.of(plain)
            for copy in self._copies:
                copy.log(plain, shown)

    def close(self) -> None:
        """Close every sink; a second call does nothing."""
        while self._copies:
            self._copies.pop().close()
        self._lines.close()


def check_record(run_folder: Path, resumed_step: int) -> None:
    """Check that a run can continue its record; nothing is changed.

    Raises:
        UserError: if metrics.jsonl cannot be read, or if a line to be kept is broken, and not by a power
            failure.
    """
    path = run_folder / METRICS_FILE
    if path.exists():
        for _ in whole_lines(path, resumed_step):
            pass


def _repeats(path: Path, resumed_step: int) -> int:
    """Return how many steps after `resumed_step` a record has; it is read as far as it is whole."""
    last = resumed_step
    with suppress(UserError):
        for line in whole_lines(path):
            last = max(last, line.step)
    return last - resumed_step


def _to_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _name_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _name_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_name_non_finite(item) for item in value]
    return value


def _keep_whole(path: Path, step: int) -> None:
    """Keep the whole records of steps up to `step` and remove the rest.

    Raises:
        UserError: as `whole_lines`.
    """
    kept: list[tuple[int, int]] = []  # ranges of bytes
    for line in whole_lines(path, step):
        start = kept.pop()[0] if kept and kept[-1][1] == line.start else line.start
        kept.append((start, line.end))
    if kept == [(0, path.stat().st_size)] and _ends_line(path):
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with path.open("rb") as source, temporary.open("wb") as target:
            for start, end in kept:
                source.seek(start)
                _copy(source, target, end - start)
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _copy(source: IO[bytes], target: IO[bytes], count: int) -> None:
    """Copy this many bytes, and a newline if they do not end with one."""
    block = b""
    while count > 0:
        block = source.read(min(count, BLOCK))
        count -= len(block)
        target.write(block)
    if not block.endswith(b"\n"):
        target.write(b"\n")
