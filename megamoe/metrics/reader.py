"""Reads the lines of metrics.jsonl, for reports and for a run that continues.

A line is whole if it is a JSON object with a `step`. A power failure leaves a torn last line, and blocks of
NUL bytes where the file had grown but its content was not yet on the disk. NULs around a record, lines with
NULs inside and a torn last line are skipped. Any other broken line is an error.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
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
SHOWN = 40  # characters of a message


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
        return self.record[names.STEP]


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
        f"{path}: line {number} is no record (a JSON object with an integer `step`): {shown!r}; remove it"
    )
