"""The recorder writes each logged step's metrics to metrics.jsonl, and to TensorBoard and W&B if enabled.

metrics.jsonl is always written, and its failure (a full disk) stops the run. TensorBoard and W&B get copies.
Only one rank may open a recorder.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megamoe.config.schema import LogConfig
from megamoe.errors import UserError
from megamoe.io import METRICS_FILE, replacing
from megamoe.metrics.formats import name_non_finite
from megamoe.metrics.reader import tail_start, whole_lines
from megamoe.metrics.sinks.summaries import summary_of
from megamoe.metrics.sinks.tensorboard_sink import TensorBoardSink
from megamoe.metrics.sinks.wandb_sink import WandbSink


class JsonLinesSink:
    """One JSON object per line, on disk as soon as it is logged.

    JSON has no NaN and no infinities: they are written as the strings "NaN", "Infinity" and
    "-Infinity", which say what happened (null would not); `reader` gives the floats back.
    """

    def __init__(self, path: Path, keep_until: int | None) -> None:
        """Append after step `keep_until`, and delete the records of later steps. None: start a new file."""
        if keep_until is not None and path.exists():
            _keep_whole(path, keep_until)
        self._file: IO[str] = path.open("w" if keep_until is None else "a", encoding="utf-8")

    def log(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(name_non_finite(metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Recorder:
    """Hands each step's metrics to metrics.jsonl, and their summaries to W&B and TensorBoard (`copies`)."""

    def __init__(self, lines: JsonLinesSink, copies: list[TensorBoardSink | WandbSink]) -> None:
        self._lines, self._copies = lines, copies

    @classmethod
    def open(
        cls, run_folder: Path, log: LogConfig, run_name: str, config: dict[str, Any], resumed_step: int | None
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
        copies: list[TensorBoardSink | WandbSink] = []
        if log.tensorboard:
            copies.append(TensorBoardSink(run_folder / "tensorboard"))
        if log.wandb.enabled:
            repeats = None if resumed_step is None else _repeats(run_folder / METRICS_FILE, resumed_step)
            copies.append(WandbSink(run_folder, log.wandb, run_name, config, repeats))
        return cls(JsonLinesSink(run_folder / METRICS_FILE, resumed_step), copies)

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one step. Values: numbers, lists of numbers, and anything with `.tolist()`."""
        plain = {key: it.tolist() if hasattr(it, "tolist") else it for key, it in metrics.items()}
        self._lines.log(plain)
        if self._copies:
            shown = summary_of(plain)
            for copy in self._copies:
                copy.log(shown)

    def close(self) -> None:
        """Close every sink; a second call does nothing."""
        while self._copies:
            self._copies.pop().close()
        self._lines.close()


def check_record(run_folder: Path, resumed_step: int) -> None:
    """Check that a run can continue its record, of a long one the end (`tail_start`); nothing is changed.

    Raises:
        UserError: if metrics.jsonl cannot be read, or if a line to be kept is broken, and not by a power
            failure.
    """
    path = run_folder / METRICS_FILE
    if path.exists():
        for _ in whole_lines(path, resumed_step, tail_start(path, resumed_step)):
            pass


def _repeats(path: Path, resumed_step: int) -> int:
    """Return how many steps after `resumed_step` a record has; it is read as far as it is whole."""
    last = resumed_step
    with suppress(UserError):
        for line in whole_lines(path, None, tail_start(path, resumed_step)):
            last = max(last, line.step)
    return last - resumed_step


def _keep_whole(path: Path, step: int) -> None:
    """Keep the whole records of steps up to `step` and remove the rest; a file with nothing to remove stays.

    Raises:
        UserError: as `whole_lines`.
    """
    start = tail_start(path, step)
    kept = start  # bytes, as long as the lines follow each other
    for line in whole_lines(path, step, start):
        kept = line.end if line.start == kept and line.ended else -1
    if kept == path.stat().st_size:
        return
    with path.open("rb") as source, replacing(path) as target:
        while (left := start - source.tell()) > 0:
            target.write(source.read(min(left, 1 << 20)))
        for line in whole_lines(path, step, start):
            source.seek(line.start)
            target.write(source.read(line.end - line.start) + (b"" if line.ended else b"\n"))
