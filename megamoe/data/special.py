"""The tokens that a tokenizer reserves for objectives: padding, masks, sentinels, language tags.

A reserved token has an id that no text is ever encoded to. Only an objective writes it into a sample. The
end-of-document token is not listed here: every tokenizer has one (`Tokenizer.eod`), and it is also what ends
a sequence (eos).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megamoe.errors import UserError

PAD, MASK, SENTINELS = "pad", "mask", "sentinels"
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
MASK_NAMES = ("<mask>", "[MASK]", "<|mask|>")
NUM_SENTINELS = 100  # of T5 (Raffel et al. 2020, section 3.1.4)
LANGUAGE_TAG = re.compile(r"<2([A-Za-z0-9_@-]+)>")
RESERVED = re.compile(r"<[^<>\s,]+>")
EXPECTED = "expected pad, mask, sentinels, sentinels=N, or tokens such as <2de>, with commas between"


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the reserved tokens by name, such as {"<pad>": 1, "<mask>": 2, "<2de>": 103}."""

    ids: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def pad(self) -> int | None:
        """The id that fills a sequence up to the length of its batch; None: there is none."""
        return self._first(PAD_NAMES)

    @property
    def mask(self) -> int | None:
        """The id that stands in place of a masked token; None: there is none."""
        return self._first(MASK_NAMES)

    @property
    def sentinels(self) -> tuple[int, ...]:
        """The ids of <extra_id_0>, <extra_id_1> and so on up to the first one that is missing."""
        found: list[int] = []
        while (name := f"<extra_id_{len(found)}>") in self.ids:
            found.append(self.ids[name])
        return tuple(found)

    @property
    def languages(self) -> dict[str, int]:
        """The id of each language's tag by the language's code, "de" for <2de>."""
        tags = ((LANGUAGE_TAG.fullmatch(name), number) for name, number in self.ids.items())
        return {tag[1]: number for tag, number in tags if tag}

    def _first(self, names: tuple[str, ...]) -> int | None:
        return next((self.ids[name] for name in names if name in self.ids), None)


NOTHING_RESERVED = SpecialTokens()


def language_tag(language: str) -> str:
    """Return the token that asks for a language: <2de> for "de" (Johnson et al. 2017, section 3)."""
    return f"<2{language}>"


def expand(wanted: str) -> list[str]:
    """Return the tokens' names that an option such as `pad,mask,sentinels,<2de>` asks for, in its order.

    `pad` is <pad>, `mask` is <mask>, `sentinels` is <extra_id_0> to <extra_id_99>, and `sentinels=N` the
    first N of them. Everything else is a name in angle brackets.

    Raises:
        UserError: for a word of another form.
    """
    names: list[str] = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        kind, _, count = word.partition("=")
        if word in (PAD, MASK):
            names.append(f"<{word}>")
        elif word == SENTINELS or (kind == SENTINELS and count.isdecimal() and 0 < int(count) <= 10_000):
            number = int(count) if count else NUM_SENTINELS
            names += [f"<extra_id_{place}>" for place in range(number)]
        elif RESERVED.fullmatch(word):
            names.append(word)
        else:
            raise UserError(f"special {word!r}: {EXPECTED}")
    return list(dict.fromkeys(names))


def check_special(wanted: list[str], found: SpecialTokens, name: str) -> None:
    """Raise a UserError if the tokenizer `name` lacks a wanted token."""
    missing = [token for token in wanted if token not in found.ids]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserError(
            f"tokenizer {name!r} does not reserve {missing[0]}{others}; train one (--tokenizer train), or "
            "add them to it as special tokens"
        )
