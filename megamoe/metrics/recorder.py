"""The recorder writes each logged step's metrics to metrics.jsonl, and to TensorBoard and W&B if enabled.

metrics.jsonl is always written, and its failure (a full disk) stops the run. TensorBoard and W&B get copies.
Only one rank may open a recorder.
"""

import json
import math
import os
from pathlib import Path
from typing import IO, Any, Protocol

from megamoe.config.schema import LogConfig
from megamoe.metrics.sinks.tensorboard_sink import TensorBoardSink
from megamoe.metrics.sinks.wandb_sink import WandbSink

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """An output for metrics."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Write one step: `step` (int), scalars, and lists of ints per expert."""

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
            _repair_last_line(path)
            _drop_after(path, keep_until)
        self._file: IO[str] = path.open("w" if keep_until is None else "a", encoding="utf-8")

    def log(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(_name_non_finite(metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Recorder:
    """Hands each step's metrics to every sink."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

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
            UserError: if TensorBoard is wanted and its package is missing.
        """
        run_folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard comes first: it alone may raise, and then no existing file has been replaced.
        copies: list[Sink] = [TensorBoardSink(run_folder / "tensorboard")] if log.tensorboard else []
        if log.wandb.enabled:
            copies.append(WandbSink(run_folder, log.wandb, run_name, config, resumed_step is not None))
        return cls([JsonLinesSink(run_folder / METRICS_FILE, resumed_step), *copies])

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one step. Values: numbers, lists of numbers, and anything with `.tolist()`."""
        plain = {key: _to_plain(value) for key, value in metrics.items()}
        for sink in self._sinks:
            sink.log(plain)

    def close(self) -> None:
        """Close every sink; a second call does nothing."""
        while self._sinks:
            self._sinks.pop().close()


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


def _drop_after(path: Path, step: int) -> None:
    """Rewrite the file without the records of later steps, whole or not at all."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step", 0) <= step]
    if len(kept) == len(lines):
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def _repair_last_line(path: Path) -> None:
    """Complete the last line if only its newline is missing; cut it off if a crash left half of it."""
    content = path.read_bytes()
    last_line = content.rpartition(b"\n")[2]
    try:
        missing = b"\n" if last_line and json.loads(last_line) else b""
    except ValueError:
        os.truncate(path, len(content) - len(last_line))
    else:
        with path.open("ab") as file:
            file.write(missing)
