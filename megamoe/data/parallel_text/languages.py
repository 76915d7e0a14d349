"""Codes of languages: one spelling for each, and the codes near to a wrong one."""

import difflib
import re
from collections.abc import Iterable

from megamoe.errors import UserError

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
