"""The record of a run for reports: the steps of metrics.jsonl, whose values are checked."""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from megamoe.errors import UserError
from megamoe.metrics import names
from megamoe.metrics.reader import LARGEST_STEP, SHOWN, whole_lines

MEASURED = ("train/", "val/", "test/", "perf/", "moe/")  # keys that begin so hold numbers
LONGEST_KEY = 100  # characters of a message


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, one per step, sorted by step.

    If a resumed run repeated a step, its last record counts. Lines broken by a crash are skipped.

    Raises:
        UserError: as `whole_lines`; if a metric is not a number, or if a layer's load is not a list of as
            many numbers as before.
    """
    by_step: dict[int, dict[str, Any]] = {}
    experts: dict[str, int] = {}
    for line in whole_lines(path):
        for key in filter(_kind, line.record):
            value = line.record[key]
            expected = _expected(key, value, experts)
            if expected is not None:
                shown = f"{key[:LONGEST_KEY]} is {_shown(value)}"
                raise UserError(f"{path}: line {line.number}: {shown}, expected {expected}; remove the line")
            line.record[key] = _in_range(value)
        by_step[line.step] = line.record
    return [by_step[step] for step in sorted(by_step)]


@lru_cache(maxsize=1 << 16)
def _kind(key: str) -> str | None:
    """Return what the key holds: a `number`, `counts`, a `load`; None if it is not read."""
    if not key.startswith(MEASURED) and key not in (names.TOKENS, names.TIME):
        return None
    found = names.IN_LAYER.fullmatch(key)
    lists = {names.LOAD: "load", names.WIDTH_HISTOGRAM: "counts", names.RANK_LOAD: "counts"}
    return "number" if found is None else lists.get(found[2], "number")


def _expected(key: str, value: Any, experts: dict[str, int]) -> str | None:
    """Return what was expected instead of the value, or None if it is valid.

    experts: the length of each load seen so far, by key.
    """
    kind = _kind(key)
    if kind == "counts":
        return None if _is_counts(value) else "a list of numbers of at least 0"
    if kind == "number":
        return None if value is None or _is_number(value) else "a number"
    if not _is_counts(value):
        return "a list of numbers of at least 0, one for each expert"
    known = experts.setdefault(key, len(value))
    return None if known == len(value) else f"{known} numbers, one for each expert, as in the lines before"


def _is_counts(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if set(map(type, value)) == {int}:  # as a rule, and several times as fast as one by one
        return bool(min(value) >= 0)
    return all(_is_number(it) and it >= 0 for it in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_range(value: Any) -> Any:
    """Return the number; an integer too large for a float becomes infinity."""
    if isinstance(value, list):
        if set(map(type, value)) == {int} and max(value) < LARGEST_STEP:
            return value
        return [_in_range(item) for item in value]
    if type(value) is int and abs(value) >= 1 << 1000:
        return math.inf if value > 0 else -math.inf
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
