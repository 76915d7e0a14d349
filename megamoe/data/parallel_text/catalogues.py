"""Reading gettext catalogues (.po, .mo): pairs of a message and its translation.

Left out: fuzzy and obsolete entries, and entries without a translation. Texts stay as they are, so that
placeholders such as %(name)s, {name} and %s are kept.

polib parses. It is one file without dependencies (MIT). Babel, the other common library, brings 33 MB of
locale data and refuses 239 of Django's catalogues for their number of plural forms.
"""

import gettext
import hashlib
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from megamoe.data.card import SourceCard
from megamoe.data.parallel_text.find import CatalogueFile
from megamoe.data.parallel_text.pair import Counts, Pair
from megamoe.errors import UserError

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
    for ending in file.endings:
        name = f"{file.name}{ending}"
        try:
            content = file.read(ending)
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
