"""Turn the message catalogues of programs into pairs, corpora and a classification task.

python examples/catalogues/prepare_catalogues.py data/wheels/*.whl --min-words 3 --output data/catalogues

Reads gettext's catalogues in wheels and folders; no code of theirs is imported. Beside what
`tools/prepare_pairs.py` writes there are `labels/`: which module a message comes from.
"""

import gettext
import hashlib
import json
import math
import re
import struct
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from megamoe import __version__
from megamoe.apps.command import run_preparation
from megamoe.apps.prepare.write import file_card
from megamoe.apps.translation import prepare_command
from megamoe.apps.translation.pairs import SPLITS, Counts, Pair, check_language, normalize_language
from megamoe.apps.translation.select import in_split, uniform
from megamoe.data.card import SourceCard, save_checked
from megamoe.errors import UserError
from megamoe.io import real

ENDINGS = (".po", ".mo")
CATALOGUE_FOLDER = "LC_MESSAGES"
NOT_CATALOGUES = {"tests", "test", "testing"}  # test data of the packages
GENERIC_DOMAINS = {"django", "messages", "default"}  # which say nothing of the module
LOCALE_FOLDERS = {"locale", "locales", "translations", "i18n"}
LARGEST_CATALOGUE = 1 << 28  # bytes


@dataclass(frozen=True)
class CatalogueFile:
    """A catalogue, not read yet.

    Attributes:
        name: how it is shown in errors and in the card.
        language: in its normal spelling.
        label: the module that the catalogue belongs to, such as `django.contrib.admin`.
        files: by ending, .po and .mo, those that are there.
    """

    name: str
    language: str
    label: str
    files: Mapping[str, Path | zipfile.Path]


def find_catalogues(item: str) -> list[CatalogueFile]:
    """Return the catalogues of a wheel, a folder, or a .po or .mo file, sorted.

    Raises:
        UserError: if it does not exist or has no catalogue.
    """
    catalogues = _in_item(item)
    if not catalogues:
        raise UserError(
            f"catalogues {item!r}: no .po or .mo file in it; expected LANGUAGE/LC_MESSAGES/*.po (or .mo), or "
            "LANGUAGE.po"
        )
    return catalogues


def _in_item(item: str) -> list[CatalogueFile]:
    path = Path(item)
    if path.is_dir():
        inside = [file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file()]
        root = real(path).name
        return _catalogues(
            item, root, {PurePosixPath(file.relative_to(path).as_posix()): file for file in inside}
        )
    if path.is_file() and path.suffix == ".whl":
        return _in_wheel(item, path)
    if path.is_file() and path.suffix in ENDINGS:
        return _catalogues(str(path.parent), path.parent.name, {PurePosixPath(path.name): path})
    what = "is no folder, wheel, .po or .mo file" if path.exists() else "does not exist"
    raise UserError(
        f"catalogues {item!r} {what}; name one, such as the wheel that 'pip download --no-deps PACKAGE' gets"
    )


def _in_wheel(item: str, path: Path) -> list[CatalogueFile]:
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(ENDINGS)]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"catalogues {item!r} cannot be read: {error}; download the wheel again") from error
    root = zipfile.Path(path)
    return _catalogues(path.name, "", {PurePosixPath(name): root.joinpath(name) for name in names})


def _catalogues(
    item: str, root: str, files: Mapping[PurePosixPath, Path | zipfile.Path]
) -> list[CatalogueFile]:
    """Return the catalogues among files; the keys are their paths inside of the item.

    root: the name of the folder that the paths begin in; empty for a wheel.
    """
    of_stem: dict[PurePosixPath, dict[str, Path | zipfile.Path]] = {}
    for inside in sorted(files, key=lambda path: (path.with_suffix(""), ENDINGS.index(path.suffix))):
        if NOT_CATALOGUES.isdisjoint(inside.parts):
            of_stem.setdefault(inside.with_suffix(""), {})[inside.suffix] = files[inside]
    found = []
    for stem, of_ending in of_stem.items():
        language, folder, domain = _language_and_module(stem)
        if language is not None:
            name = f"{item}:{stem}" if root == "" else str(PurePosixPath(item) / stem)
            found.append(CatalogueFile(name, language, _label(root, folder, domain), of_ending))
    return found


def _language_and_module(stem: PurePosixPath) -> tuple[str | None, PurePosixPath, str]:
    """Return the language, the folder of the module, and the domain ("" for LANGUAGE.po)."""
    parent = stem.parent
    if parent.name == CATALOGUE_FOLDER:
        return normalize_language(parent.parent.name), parent.parent.parent, stem.name
    return normalize_language(stem.name), parent, ""


def _label(root: str, folder: PurePosixPath, domain: str) -> str:
    """Return the module's dotted name, with the domain if that says more than `django` or `messages`.

    The catalogues of JavaScript belong to the same module: djangojs is django.
    """
    parts = [part for part in (root, *folder.parts) if part]
    if len(parts) > 1 and parts[-1] in LOCALE_FOLDERS:
        parts.pop()
    module = ".".join(parts)
    domain = domain.removesuffix("js")
    return module if domain in GENERIC_DOMAINS or not domain else f"{module}/{domain}"


CHARSET = re.compile(rb"charset=([A-Za-z0-9_.:-]+)")
PLURAL_FORMS = re.compile(r"nplurals\s*=\s*(\d+)\s*;\s*plural\s*=\s*([^;]+)")
MANY = range(2, 200)  # numbers by which the form of "many" is found
EMPTY = "catalogues without a message"
DEFAULT = "Default:"  # how Zope's and Plone's catalogues give the English text of a message


def read_catalogue(file: CatalogueFile, counts: Counts) -> Iterator[Pair]:
    """Yield the pairs of a catalogue.

    A message with plural forms gives two pairs: its singular with the form of the number 1, and its plural
    with the form that most numbers take. Where a comment gives the English text of a message that is only a
    key (`Default: "..."`), that text is the source.

    Raises:
        UserError: if polib is missing; if the catalogue is empty, or broken in each of its files.
    """
    catalogue, name, content = _parse(file, counts)
    entries = pairs = 0
    form_of_one, form_of_many = _plural_forms(catalogue.metadata.get("Plural-Forms", ""))
    for entry in catalogue:
        entries += 1
        if entry.obsolete or "fuzzy" in entry.flags:
            counts.left_out["obsolete" if entry.obsolete else "fuzzy"] += 1
            continue
        if entry.msgid_plural:
            forms = {int(number): text for number, text in entry.msgstr_plural.items()}
            one, many = _of_form(forms, form_of_one, 0), _of_form(forms, form_of_many, max(forms, default=0))
            sides = [(entry.msgid, one), (entry.msgid_plural, many)]
            identities: tuple[str, ...] = (entry.msgid, entry.msgid_plural)
        else:
            source = _default_text(entry.comment) or entry.msgid
            sides, identities = [(source, entry.msgstr)], (entry.msgid,)
        for source, target in sides:
            if not target.strip() or not source.strip():
                counts.left_out["without translation"] += 1
            else:
                pairs += 1
                yield Pair(source, target, file.language, file.label, identities)
    if not entries:
        counts.left_out[EMPTY] += 1
    digest = hashlib.sha256(content).hexdigest()
    counts.sources.append(SourceCard(name, len(content), digest, pairs))


def _parse(file: CatalogueFile, counts: Counts) -> tuple[Any, str, bytes]:
    """Return polib's catalogue of the first of the files that can be read, the file's name and its bytes."""
    problems = []
    for ending, path in file.files.items():
        name = f"{file.name}{ending}"
        try:
            with path.open("rb") as opened:
                content = opened.read(LARGEST_CATALOGUE)
        except OSError as error:
            problems.append(f"{name}: cannot be read: {error.strerror or error}")
            continue
        if not content.strip():
            problems.append(f"{name}: empty file")
            continue
        try:
            catalogue = _parse_po(content) if ending == ".po" else _parse_mo(content)
        except UserError as error:
            problems.append(f"{name}: {error}")
            continue
        counts.warnings += [f"{problem}; {name} is read instead" for problem in problems]
        return catalogue, name, content
    raise UserError(f"{problems[0]}; mend the catalogue, or leave broken ones out with --skip-broken")


def _polib() -> Any:
    try:
        import polib
    except ImportError as error:
        raise UserError(
            "reading catalogues needs polib, which is not installed; install it: pip install polib"
        ) from error
    return polib


def _parse_po(content: bytes) -> Any:
    polib = _polib()
    found = CHARSET.search(content[:10_000])
    charset = found[1].decode() if found and found[1] != b"CHARSET" else "utf-8"
    try:
        text = content.decode(charset).removeprefix("\ufeff")
    except LookupError as error:
        raise UserError(f"unknown encoding {charset!r}") from error
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise UserError(f"line {line} is not {charset} text: {error.reason}") from error
    try:
        # A newline more: polib would take the name of a file for the file.
        return polib.pofile(f"{text}\n\n")
    except (OSError, ValueError, IndexError, KeyError, AttributeError) as error:
        found_line = re.search(r"\(?line (\d+)\)?(?:: (.*))?", str(error))
        where = f"line {found_line[1]}" if found_line else " ".join(str(error).split())
        raise UserError(f"broken: syntax error, {where}") from error


def _parse_mo(content: bytes) -> Any:
    try:
        return _polib().mofile(content)
    except (OSError, ValueError, IndexError, KeyError, struct.error, LookupError) as error:
        raise UserError(f"broken: {' '.join(str(error).split())}") from error


def _plural_forms(header: str) -> tuple[int | None, int | None]:
    """Return the forms of 1 and of most larger numbers by a `Plural-Forms` header; None: not known.

    The formula is compiled by gettext, which allows only n, numbers and operators of C.
    """
    found = PLURAL_FORMS.search(header)
    if not found:
        return None, None
    try:
        formula: Callable[[int], int] = gettext.c2py(found[2].strip())
        return int(formula(1)), Counter(int(formula(number)) for number in MANY).most_common(1)[0][0]
    except (ValueError, ZeroDivisionError, RecursionError, OverflowError):
        return None, None


def _of_form(forms: dict[int, str], number: int | None, otherwise: int) -> str:
    """Return the text of a plural form. If the formula names none of the forms, it is the `otherwise`-th."""
    return forms.get(otherwise if number is None or number not in forms else number, "")


def _default_text(comment: str) -> str:
    """Return the English text of a comment `Default: "..."`, which may go on over quoted lines; else ""."""
    lines = [line.strip() for line in (comment or "").splitlines()]
    start = next((place for place, line in enumerate(lines) if line.startswith(DEFAULT)), None)
    if start is None:
        return ""
    lines[start] = lines[start].removeprefix(DEFAULT).strip()
    parts = []
    for line in lines[start:]:
        if len(line) < 2 or not (line.startswith('"') and line.endswith('"')):
            break
        parts.append(line[1:-1])
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], "".join(parts)).strip()


LABELS_FILE = "labels.json"
LEAST_LABELS = 2
SHARES = (0.9, 0.05, 0.05)  # of train, valid and test by default


def write_labels(
    pairs: Sequence[Pair],
    splits: Sequence[str],
    source_language: str,
    min_examples: int,
    folder: Path,
    most: Mapping[str, int] | None = None,
) -> list[str]:
    """Write train.jsonl, valid.jsonl and test.LANGUAGE.jsonl; return the labels, sorted.

    Training and validation texts are the sources, in the source language. The test sets are the test split's
    sources, and for each language their translations. A text with several labels, in any split, is left out,
    and so is a label with fewer than `min_examples` training texts. Nothing is written for fewer than two
    labels.

    most: by split, how many texts of a label are kept in each of its sets; None: all. They are drawn by a
    hash of the source, so that the sets of all languages have the same messages.
    """
    labels_of: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        labels_of[pair.source].add(pair.label)
    unique = {source: min(labels) for source, labels in labels_of.items() if len(labels) == 1}
    counts = Counter(_sources(in_split(pairs, splits, "train"), unique).values())
    labels = sorted(label for label, number in counts.items() if label and number >= min_examples)
    if len(labels) < LEAST_LABELS:
        return []
    folder.mkdir()
    sets = _sets(pairs, splits, source_language, unique)
    if most is not None:
        source_of = _source_of(pair for pair in in_split(pairs, splits, "test") if pair.source in unique)
        for name, label_of in sets.items():
            split, _, language = name.partition(".")
            sets[name] = _at_most(most[split], label_of, source_of.get(language, {}))
        counts = Counter(sets["train"].values())
    content = {}
    for name, label_of in sets.items():
        language = name.partition(".")[2] or source_language
        lines = [
            json.dumps({"text": text, "label": label, "language": language}, ensure_ascii=False)
            for text, label in label_of.items()
            if label in labels
        ]
        if not lines:
            continue
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        file = file_card(path)
        content[path.name] = {"examples": len(lines), "size": file.size, "sha256": file.sha256}
    save_checked(
        {
            "megamoe": __version__,
            "labels": labels,
            "train": {one: counts[one] for one in labels},
            "files": content,
        },
        folder / LABELS_FILE,
    )
    return labels


def _sets(
    pairs: Sequence[Pair], splits: Sequence[str], source_language: str, unique: dict[str, str]
) -> dict[str, dict[str, str]]:
    """Return the label of each text, by set."""
    sets: dict[str, dict[str, str]] = {
        "train": _sources(in_split(pairs, splits, "train"), unique),
        "valid": _sources(in_split(pairs, splits, "valid"), unique),
        f"test.{source_language}": _sources(in_split(pairs, splits, "test"), unique),
    }
    labels_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for pair in pairs:
        labels_of[pair.language, pair.target].add(pair.label)
    for pair in in_split(pairs, splits, "test"):
        if pair.source in unique and len(labels_of[pair.language, pair.target]) == 1:
            sets.setdefault(f"test.{pair.language}", {})[pair.target] = unique[pair.source]
    return sets


def _source_of(pairs: Iterable[Pair]) -> dict[str, dict[str, str]]:
    """Return the source of each translation, by language; of several the one that is drawn first."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for pair in pairs:
        of_language = found[pair.language]
        known = of_language.get(pair.target, pair.source)
        of_language[pair.target] = min(known, pair.source, key=uniform)
    return found


def _at_most(number: int, label_of: dict[str, str], source_of: Mapping[str, str]) -> dict[str, str]:
    """Return so many texts of each label, in their order."""
    drawn: dict[str, list[str]] = defaultdict(list)
    for text in sorted(label_of, key=lambda text: uniform(source_of.get(text, text))):
        drawn[label_of[text]].append(text)
    kept = {text for texts in drawn.values() for text in texts[:number]}
    return {text: label for text, label in label_of.items() if text in kept}


def _sources(pairs: Iterable[Pair], unique: dict[str, str]) -> dict[str, str]:
    """Return the label of each source that has one label, in the order of the pairs."""
    return {pair.source: unique[pair.source] for pair in pairs if pair.source in unique}


def main(arguments: list[str] | None = None) -> int:
    """Prepare; return the exit code."""
    parser = prepare_command.pairs_parser(__doc__)
    parser.set_defaults(skip_broken=False, min_label=20, max_label=None, label_by="module")
    add = parser.add_argument
    add("catalogues", nargs="+", metavar="ITEM", help="of gettext: wheels, folders, .po or .mo files")
    add("--skip-broken", action="store_true", help="leave broken catalogues out, with a warning")
    add("--min-label", type=int, help="leave out labels with fewer training texts (default 20)")
    add("--max-label", type=int, help="keep at most so many training texts of a label (default all)")
    add("--label-by", choices=("module", "application"), help="what the labels are (default module)")
    options = vars(parser.parse_args(arguments))
    return run_preparation(lambda: _work(options))


def _work(options: dict[str, Any]) -> None:
    items, skips = options.pop("catalogues"), options.pop("skip_broken")
    least, most, kind = (options.pop(name) for name in ("min_label", "max_label", "label_by"))
    if not 1 <= least <= (most or least):
        raise UserError(f"--min-label {least}: expected at least 1, and at most --max-label")

    def finish(pairs: Sequence[Pair], splits: Sequence[str], folder: Path) -> None:
        if kind == "application":
            pairs = [replace(pair, label=re.split("[./]", pair.label)[0]) for pair in pairs]
        shares, source_language = options.get("split", SHARES), options.get("source_language", "en")
        of_splits = {split: share / shares[0] for split, share in zip(SPLITS, shares, strict=True)}
        bounds = most and {split: math.ceil(most * share) for split, share in of_splits.items()}
        language = check_language(source_language)
        labels = write_labels(pairs, splits, language, least, folder / "labels", bounds)
        print(f"labels: {len(labels)}")

    prepare_command.prepare(options, further=partial(read_catalogues, items, skips), finish=finish)


def read_catalogues(items: list[str], skips: bool, counts: Counts) -> Iterator[Pair]:
    """Yield the pairs of all catalogues. skips: broken ones are left out, with a warning."""
    for item in items:
        found = 0
        for file in find_catalogues(item):
            try:
                for pair in read_catalogue(file, counts):
                    found += 1
                    yield pair
            except UserError as error:
                if not skips:
                    raise
                counts.left_out["broken catalogues"] += 1
                counts.warnings.append(f"left out: {error}")
        if not found:
            raise UserError(f"catalogues {item!r}: empty: no message in it is translated; leave it out")


if __name__ == "__main__":
    sys.exit(main())
