"""Pairs of texts, the codes of their languages, and reading them from aligned files and TSV."""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from megamoe.apps.prepare.sources import Source, Tap
from megamoe.data.card import SourceCard
from megamoe.errors import UserError

SPLITS = ("train", "valid", "test")
SPLIT_MARK = "{split}"
SCRIPTS = {"latin": "Latn", "cyrillic": "Cyrl", "devanagari": "Deva", "arabic": "Arab"}
CODE = re.compile(r"[A-Za-z]{2,3}(?:[_@-][A-Za-z0-9]+)*")


def normalize_language(code: str) -> str | None:
    """Return a code in the spelling of gettext: `pt_BR` for pt-br, `sr_Latn` for sr@latin; None: it is none.

    Parts of two letters are countries, parts of four letters are scripts. Other parts are lower case.
    """
    code = code.split(".")[0]  # of de_DE.UTF-8
    if not CODE.fullmatch(code):
        return None
    first, *rest = re.split(r"[_@-]", code)
    parts = [first.lower()]
    for part in rest:
        part = SCRIPTS.get(part.lower(), part)
        parts.append(part.upper() if len(part) <= 2 else part.title() if len(part) == 4 else part.lower())
    return "_".join(parts)


def select_languages(wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the wanted languages in their normal spelling, sorted.

    Raises:
        UserError: for a language that is not among the known ones; it lists near ones.
    """
    known = sorted(known)
    chosen = set()
    for code in wanted:
        language = normalize_language(code)
        if language not in known:
            raise UserError(f"language {code!r} is not in the data; {_near(code, known)}")
        chosen.add(language)
    return sorted(chosen)


def _near(code: str, known: list[str]) -> str:
    same = [one for one in known if one.split("_")[0] == code.split("_")[0].lower()]
    near = same or difflib.get_close_matches(code, known, n=5, cutoff=0.5)
    if near:
        return f"near ones are {', '.join(near[:8])}"
    more = f" and {len(known) - 12} others" if len(known) > 12 else ""
    return f"there are {', '.join(known[:12])}{more}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A text and its translation.

    Attributes:
        source, target: the texts, as they stand in the file.
        language: of the target, such as "de" or "pt_BR".
        label: what it is about, such as the module that it comes from; empty if that is not known.
        identities: further texts that identify the message, such as the singular of a plural. Pairs with a
            source or an identity in common go to the same split.
        split: train, valid or test where the file is of one; empty if the split is to be drawn.
    """

    source: str
    target: str
    language: str
    label: str = ""
    identities: tuple[str, ...] = ()
    split: str = ""


@dataclass
class Counts:
    """What was read and what was left out, for the card, and the warnings to print.

    sources: the files that were read to their ends; their `documents` are the pairs, or lines, in them.
    bad_lines: `skip` leaves lines out that are no pair.
    """

    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    warnings: list[str] = field(default_factory=list)
    sources: list[SourceCard] = field(default_factory=list)
    bad_lines: str = "error"


COLUMNS = 2


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


def read_splits(given: Iterable[Sequence[str]], counts: Counts) -> Iterator[Pair]:
    """Yield the pairs of ready-made splits: those of test of all of them first, then valid, then train.

    given: of each the language and the names of aligned files, source and target, in which {split} stands for
    train, valid and test, such as `wmt/{split}.en`. Valid or test may be missing. A pair of train that is
    also in another split comes after it, and is left out as equal to another pair.

    Raises:
        UserError: if a name has no {split}, the files of train or those of both others are missing, one side
            of a split is missing, or as `read_aligned`.
    """
    files = [(language, _splits_of(source, target)) for language, source, target in given]
    for split in reversed(SPLITS):
        for language, named in files:
            if split in named:
                of_source, of_target = named[split]
                for pair in read_aligned(language, of_source, of_target, counts):
                    yield replace(pair, split=split)


def _splits_of(source: str, target: str) -> dict[str, list[str]]:
    """Return the files of each split that is there, source and target."""
    for name in (source, target):
        if SPLIT_MARK not in name:
            raise UserError(
                f"--split-files {name!r}: expected {SPLIT_MARK} in the name, in place of train, valid "
                "and test, such as data/wmt/{split}.en"
            )
    named = {split: [name.replace(SPLIT_MARK, split) for name in (source, target)] for split in SPLITS}
    there = [split for split, names in named.items() if any(Path(name).exists() for name in names)]
    if there[:1] != ["train"] or len(there) < 2:
        raise UserError(
            f"--split-files {source!r}: found files of {' and '.join(there) or 'no split'}, expected train "
            "and at least one of valid and test"
        )
    return {split: named[split] for split in there}


def read_tsv(language: str, path: str, counts: Counts) -> Iterator[Pair]:
    """Yield the two columns of each line, source and target, with a tab between.

    Raises:
        UserError: if the file cannot be read, is empty, or if a line has not two columns.
    """
    language, number = check_language(language), 0
    for number, line in enumerate(_lines(path, counts), start=1):
        columns = line.split("\t")
        if len(columns) == COLUMNS:
            yield from _pair(columns[0], columns[1], language, counts)
        elif counts.bad_lines == "error":
            raise UserError(
                f"{path}:{number}: {len(columns)} columns, expected {COLUMNS}: source, a tab, target; or "
                "leave such lines out with --bad-lines skip"
            )
        else:
            counts.left_out["bad line"] += 1
    if not number:
        raise UserError(f"{path}: empty; expected lines of source, a tab, target")


def check_language(code: str) -> str:
    """Return a code in its normal spelling; raise a UserError if it is none."""
    language = normalize_language(code)
    if language is None:
        raise UserError(f"language {code!r}: expected a code such as de, pt_BR or sr_Latn")
    return language


def _pair(source: str, target: str, language: str, counts: Counts) -> Iterator[Pair]:
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
    source, number = Source(path, Path(path)), 0
    with closing(Tap(source)) as tap:
        for number, line in enumerate(tap.lines(), start=1):  # noqa: B007
            yield line
        counts.sources.append(tap.card(number))
