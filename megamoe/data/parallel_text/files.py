"""Reading pairs from two line-aligned files, from TSV and from JSON lines (all also as .gz and .zst)."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from megamoe.data.card import SourceCard
from megamoe.data.parallel_text.languages import normalize_language
from megamoe.data.parallel_text.pair import Counts, Pair
from megamoe.data.sources import Source, Tap, read_lines
from megamoe.errors import UserError

COLUMNS = 2
KEYS = ("source", "target", "language")


def read_aligned(language: str, source: str, target: str, counts: Counts) -> Iterator[Pair]:
    """Yield line i of the file `source` with line i of the file `target`.

    Raises:
        UserError: if a file cannot be read, or if the files have different numbers of lines.
    """
    language = check_language(language)
    sides = (_lines(source, counts), _lines(target, counts))
    number = 0
    for number, (left, right) in enumerate(itertools.zip_longest(*sides), start=1):
        if left is None or right is None:
            short, long, rest = (source, target, sides[1]) if left is None else (target, source, sides[0])
            total = number + sum(1 for _ in rest)
            raise UserError(
                f"pair {language}: {short!r} has {number - 1} lines, {long!r} has {total}; expected the same "
                "number, line by line translations of each other"
            )
        yield from _pair(left, right, language, counts)
    if not number:
        raise UserError(f"pair {language}: {source!r} and {target!r} are empty; expected a text in each line")


def read_tsv(language: str, path: str, counts: Counts) -> Iterator[Pair]:
    """Yield the two columns of each line, source and target, with a tab between.

    Raises:
        UserError: if the file cannot be read, is empty, or if a line has not two columns.
    """
    language = check_language(language)
    number = 0
    for number, line in enumerate(_lines(path, counts), start=1):
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise UserError(
                f"{path}:{number}: {len(columns)} columns, expected {COLUMNS}: source, a tab, target"
            )
        yield from _pair(columns[0], columns[1], language, counts)
    if not number:
        raise UserError(f"{path}: empty; expected lines of source, a tab, target")


def read_json_lines(path: str, keys: Iterable[str], counts: Counts) -> Iterator[Pair]:
    """Yield the pair of each line's object; `keys` are those of source, target and language.

    Raises:
        UserError: if the file cannot be read, is empty, or if a line is not such an object.
    """
    names = list(keys)
    number = 0
    for number, line in enumerate(_lines(path, counts), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}; write an object a line") from error
        if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in names):
            found = f"keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
            raise UserError(
                f"{path}:{number}: expected texts under {', '.join(names)}, found {found}; give --keys"
            )
        source, target, language = (record[name] for name in names)
        normal = normalize_language(language)
        if normal is None:
            raise UserError(f"{path}:{number}: language {language!r}: expected a code such as de or pt_BR")
        yield from _pair(source, target, normal, counts)
    if not number:
        raise UserError(f"{path}: empty; expected a JSON object a line")


def check_language(code: str) -> str:
    """Return a code in its normal spelling; raise a UserError if it is none."""
    language = normalize_language(code)
    if language is None:
        raise UserError(f"language {code!r}: expected a code such as de, pt_BR or sr_Latn")
    return language


def _pair(source: str, target: str, language: str, counts: Counts) -> Iterator[Pair]:
    try:
        (source + target).encode("utf-8")
    except UnicodeEncodeError:
        counts.left_out["half a surrogate pair"] += 1
        return
    if source.strip() and target.strip():
        yield Pair(source, target, language)
    else:
        counts.left_out["without translation"] += 1


def _lines(path: str, counts: Counts) -> Iterator[str]:
    """Yield the lines of a file without their ends; raise a UserError for what is not UTF-8.

    A file that was read to its end is noted in `counts`, with the number of its lines.
    """
    if not Path(path).is_file():
        raise UserError(f"{path!r} is no file; expected text, also as .gz or .zst")
    try:
        tap = Tap(Source(path, Path(path)), lambda _: None)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    with tap:
        number = 0
        for number, line in enumerate(read_lines(Source(path, Path(path)), tap), start=1):  # noqa: B007
            yield line
        counts.sources.append(SourceCard(path, tap.num_bytes, tap.sha256(), number))
