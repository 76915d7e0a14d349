"""Reading metrics.jsonl, which `recorder.py` writes."""

import json
from pathlib import Path
from typing import Any

from megamoe.errors import UserError

NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, one per step, sorted by step.

    If a resumed run repeated a step, its last record counts. A last line that a crash left incomplete is
    skipped.

    Raises:
        UserError: if the file cannot be read, or if another line is no JSON object with a `step`.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the metrics ({error.strerror}); expected a run's metrics.jsonl"
        ) from None
    by_step: dict[int, dict[str, Any]] = {}
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines[: last + 1]):
        record = _parse(line)
        if record is not None:
            by_step[record["step"]] = record
        elif number < last and line.strip():
            raise UserError(
                f"{path}: line {number + 1} is no record: {line[:40]!r}; expected a JSON object with an "
                "integer `step`; remove the line"
            )
    return [by_step[step] for step in sorted(by_step)]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {
        key: NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in record.items()
    }
