"""What describes prepared pairs: `PREFIX.pairs.json`, beside the two datasets of a split.

`PREFIX.source` and `PREFIX.target` are datasets of the usual format, with cards of their own. Document i of
the one is the translation of document i of the other. The pairs of a language follow each other, and the
card says which language has how many.
"""

from dataclasses import dataclass
from pathlib import Path

from megamoe.data.card import DataCard, PairFiles, check_files, load_card, load_checked
from megamoe.errors import UserError

REMEDY = "prepare the pairs again with tools/prepare_pairs.py"


@dataclass(frozen=True)
class LanguageCard:
    """A language's pairs, and the tokens of both sides, end-of-document tokens included."""

    language: str
    pairs: int
    source_tokens: int
    target_tokens: int


@dataclass(frozen=True)
class PairCard:
    """The pairs of a split, language after language, and the .idx files that they belong to."""

    megamoe: str
    source_language: str
    languages: list[LanguageCard]
    source_idx_sha256: str
    target_idx_sha256: str


def load_pair_card(prefix: str) -> tuple[PairCard, DataCard, DataCard]:
    """Return the cards of a split: of the pairs, of their sources, of their targets. Reads no tokens.

    Raises:
        UserError: if a file is missing, damaged or of another preparation than the others.
    """
    files = PairFiles(Path(prefix))
    if not files.card.exists():
        cards = sorted(path.name for path in files.prefix.parent.glob("*.pairs.json"))
        there = f"there is {', '.join(cards)}" if cards else "make it with tools/prepare_pairs.py"
        raise UserError(f"pairs {prefix!r}: no file {str(files.card)!r}; {there}")
    card = load_checked(files.card, PairCard)
    sides = []
    for name, side, sha256 in (
        ("source", files.source, card.source_idx_sha256),
        ("target", files.target, card.target_idx_sha256),
    ):
        found_card = load_card(str(side.prefix))
        if found_card is None:
            raise UserError(f"pairs {prefix!r}: no data card {str(side.card)!r}; {REMEDY}")
        check_files(str(side.prefix), found_card)
        pairs = sum(language.pairs for language in card.languages)
        if found_card.idx.sha256 != sha256 or found_card.documents != pairs:
            raise UserError(
                f"pairs {prefix!r}: the {name} side has {found_card.documents} texts of another preparation "
                f"than its card, with {pairs} pairs; {REMEDY}"
            )
        sides.append(found_card)
    if sides[0].tokenizer.fingerprint != sides[1].tokenizer.fingerprint:
        raise UserError(f"pairs {prefix!r}: the sides were made with different tokenizers; {REMEDY}")
    return card, sides[0], sides[1]
