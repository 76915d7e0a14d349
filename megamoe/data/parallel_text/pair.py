"""A pair of texts, a text and its translation, and what is counted while pairs are read."""

from collections import Counter
from dataclasses import dataclass, field

from megamoe.data.card import SourceCard


@dataclass(frozen=True, slots=True)
class Pair:
    """A text and its translation.

    Attributes:
        source, target: the texts, as they stand in the file.
        language: of the target, such as "de" or "pt_BR".
        label: which application or module it comes from; empty if that is not known.
        identities: further texts that identify the message, such as the singular of a plural. Pairs with a
            source or an identity in common go to the same split.
    """

    source: str
    target: str
    language: str
    label: str = ""
    identities: tuple[str, ...] = ()


@dataclass
class Counts:
    """What was read and what was left out, for the card, and the warnings to print.

    sources: the files that were read to their ends; their `documents` are the pairs, or lines, in them.
    """

    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    warnings: list[str] = field(default_factory=list)
    sources: list[SourceCard] = field(default_factory=list)
