"""Reads metrics.jsonl, for reports and for a run that continues.

A line is whole if it is a JSON object with a `step`. A power failure leaves a torn last line, and blocks of
NUL bytes where the file had grown but its content was not yet on the disk. NULs around a record, lines with
NULs inside and a torn last line are skipped. Any other broken line is an error.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from megamoe.errors import UserError
from megamoe.io import open_plain, parse_json, reason
from megamoe.metrics import names
from megamoe.metrics.formats import NON_FINITE

LONGEST_LINE = 1 << 26  # bytes; a step of 1,000 layers of 1,000 experts has some ten million
TAIL_BYTES = 1 << 26  # of a long record, which a run that continues reads
LARGEST_STEP = 1 << 53  # exact as a float, which charts make of it
BLANK = b"\0 \t\r\n"
MEASURED = ("train/", "val/", "test/", "perf/", "moe/")  # keys that begin so hold numbers
SHOWN, LONGEST_KEY = 40, 100  # characters of a message


@dataclass(frozen=True)
class Line:
    """A whole record.

    number: its line, from 1. start, end: its bytes in the file, including a newline that follows at once.
    ended: that newline is there.
    """

    number: int
    start: int
    end: int
    record: dict[str, Any]
    ended: bool

    @property
    def step(self) -> int:
        """The step of the record."""
        step: int = self.record[names.STEP]
        return step


def tail_start(path: Path, step: int) -> int:
    """Return the byte from which a run that continues after `step` reads its record: the beginning of a line.

    It lies TAIL_BYTES before the end, or further where the steps there are later ones. What lies before has
    earlier steps, for a run that continues removes the later ones; it is neither read nor changed, because a
    long run's record takes many minutes to parse.
    """
    back = TAIL_BYTES
    with suppress(OSError, ValueError):  # `whole_lines` says what is wrong
        size = path.stat().st_size
        while back < size:
            with open_plain(path) as file:
                file.seek(size - back)
                file.readline(LONGEST_LINE)  # the rest of a line
                start = file.tell()
                record = _parse(file.readline(LONGEST_LINE).strip(BLANK))
            if record is not None and record[names.STEP] <= step:
                return start
            back *= 2
    return 0


def whole_lines(path: Path, keep_until: int | None = None, start: int = 0) -> Iterator[Line]:
    """Return the whole records of a `metrics.jsonl` in order, without those of steps after `keep_until`.

    start: the byte to begin at, where a line begins, which then has the number 1.

    Raises:
        UserError: if the file cannot be read; if a line before one of those is broken, and not by NULs.
    """
    try:
        file = open_plain(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot read the metrics ({reason(error)}); expected a run's metrics.jsonl"
        ) from None
    broken: UserError | None = None
    with file:
        file.seek(start)
        for number, at, raw in _lines(file, start):
            text = raw.strip(BLANK)
            record = _parse(text)
            if record is None:
                if broken is None and text and b"\0" not in raw:
                    broken = _broken(path, _count_lines(path, start) + number, text)
                continue
            if keep_until is not None and record[names.STEP] > keep_until:
                continue
            if broken is not None:
                raise broken
            begin = at + raw.index(text)
            end = begin + len(text)
            ended = raw.startswith(b"\n", end - at)
            yield Line(number, begin, end + ended, record, ended)


def _lines(file: BinaryIO, start: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, offset in the file, bytes) of each line; a line that is too long comes in pieces.

    start: the offset of the first.
    """
    number = 1
    while raw := file.readline(LONGEST_LINE):
        yield number, start, raw
        number += raw.endswith(b"\n")
        start += len(raw)


def _count_lines(path: Path, end: int) -> int:
    """Return the number of newlines in the first `end` bytes."""
    with open_plain(path) as file:
        blocks = iter(lambda: file.read(min(1 << 20, end - file.tell())), b"")
        return sum(block.count(b"\n") for block in blocks)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(text.decode("utf-8"))
    except ValueError:
        return None
    step = record.get(names.STEP) if isinstance(record, dict) else None
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        return None
    return {
        key: NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in record.items()
    }


def _broken(path: Path, number: int, text: bytes) -> UserError:
    shown = text[:SHOWN].decode("utf-8", errors="backslashreplace")
    return UserError(
        f"{path}: line {number} is no record: {shown!r}; expected a JSON object with an integer `step`; "
        "remove the line"
    )


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
