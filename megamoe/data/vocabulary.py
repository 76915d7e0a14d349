"""The run's vocabulary, on which the data cards, `data.tokenizer` and `model.vocab_size` must agree."""

from dataclasses import dataclass, replace
from pathlib import Path

from megamoe.config.schema import DataConfig
from megamoe.data.card import DataCard, TokenizerCard, check_files, datasets_of, load_card
from megamoe.data.special import NOTHING_RESERVED, SpecialTokens
from megamoe.data.tokenizers import Tokenizer, is_bytes, load_tokenizer
from megamoe.errors import UserError

MOCK_VOCAB_SIZE = 1024
MOCK_EOD = 0


@dataclass(frozen=True)
class Vocabulary:
    """The run's token ids.

    Attributes:
        size: every id is smaller; the model's vocabulary before padding.
        eod: the end-of-document id; None if it is unknown.
        tokenizer: None for mock data, and if neither the card nor `data.tokenizer` names one that exists.
        special: the reserved tokens (pad, mask, sentinels, language tags); none if they are unknown.
        added: the number of ids at the end that no data has: the mask or sentinels of an objective.
        in_data: the ids that the data's tokenizer has, at most `size`; 2 if they are unknown, or any will do.
    """

    size: int
    eod: int | None
    tokenizer: Tokenizer | None
    special: SpecialTokens = NOTHING_RESERVED
    added: int = 0
    in_data: int = 2

    def with_added(self, ids: int, model_vocab_size: int | None = None) -> "Vocabulary":
        """Return the vocabulary with so many ids after those of the data.

        model_vocab_size: `model.vocab_size`; if it is given, the ids are its last ones.

        Raises:
            UserError: if that size does not hold the ids of the data and these.
        """
        if model_vocab_size is None:
            return replace(self, size=self.of_data.size + ids, added=ids)
        needed = self.in_data + ids
        if ids and model_vocab_size < needed:
            raise UserError(
                f"model.vocab_size {model_vocab_size} is smaller than the data's vocabulary with the {ids} "
                f"ids that train.objective adds, {needed}; raise it to {needed} or leave it out"
            )
        return replace(self, size=model_vocab_size, added=ids)

    @property
    def pad(self) -> int:
        """The id that fills sequences up: the reserved one, or the end-of-document id; 0 without either."""
        return (self.eod or 0) if self.special.pad is None else self.special.pad

    @property
    def of_data(self) -> "Vocabulary":
        """The vocabulary without the ids that the data does not have."""
        return replace(self, size=self.size - self.added, added=0)

    @property
    def data_size(self) -> int:
        """Every id that the data can have is smaller; `model.vocab_size` may be larger than needed."""
        return self.in_data if self.in_data > 2 else self.of_data.size


def resolve_vocabulary(data: DataConfig, model_vocab_size: int | None) -> Vocabulary:
    """Check the data's files and return the vocabulary. Reads only cards and index headers.

    Of prepared pairs both sides are checked.

    Raises:
        UserError: for files that are missing, truncated, empty or unfinished; for sources, a
            `data.tokenizer` or a `model.vocab_size` that do not fit each other.
    """
    if data.mock:
        tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else None
        size = model_vocab_size or (tokenizer.vocab_size if tokenizer else MOCK_VOCAB_SIZE)
        if tokenizer is None:
            return Vocabulary(size, MOCK_EOD, None)
        return Vocabulary(size, tokenizer.eod, tokenizer, tokenizer.special)
    if not data.sources:
        raise UserError("data.sources is empty; expected at least one prepared dataset, or data.mock: true")
    for name, sources in data.validation.items():
        if not sources:
            raise UserError(f"data.validation.{name} is empty; expected at least one prepared dataset")
    named = [source.path for sources in (data.sources, *data.validation.values()) for source in sources]
    paths = [path for prefix in named for path in datasets_of(prefix)]
    known: tuple[str, TokenizerCard] | None = None
    for path in paths:
        card = load_card(path)
        check_files(path, card)
        if card:
            known = known or (path, card.tokenizer)
            _check_agreement(known, path, card)
    tokenizer = _find_tokenizer(data, known)
    found: Tokenizer | TokenizerCard | None = known[1] if known else tokenizer
    if found is None and model_vocab_size is None:
        raise UserError(f"data {paths[0]!r} has no data card; give data.tokenizer or model.vocab_size")
    if found is not None and model_vocab_size is not None and model_vocab_size < found.vocab_size:
        raise UserError(
            f"model.vocab_size {model_vocab_size} is below the data's, {found.vocab_size}; leave it out"
        )
    size = model_vocab_size or (found.vocab_size if found else 0)
    special = tokenizer.special if tokenizer else SpecialTokens(known[1].special if known else {})
    in_data = found.vocab_size if found else 2
    return Vocabulary(size, found.eod if found else None, tokenizer, special, in_data=in_data)


def _check_agreement(known: tuple[str, TokenizerCard], path: str, card: DataCard) -> None:
    first_path, first = known
    if card.tokenizer.fingerprint != first.fingerprint:
        raise UserError(
            f"data {path!r} was made with another tokenizer (vocabulary {card.tokenizer.vocab_size}) than "
            f"{first_path!r} (vocabulary {first.vocab_size}); prepare both with the same --tokenizer"
        )


def _find_tokenizer(data: DataConfig, known: tuple[str, TokenizerCard] | None) -> Tokenizer | None:
    """Return `data.tokenizer` if set, else the card's if its file exists; compare it with the card."""
    if known is None:
        return load_tokenizer(data.tokenizer) if data.tokenizer else None
    path, card = known
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(data.tokenizer)
        way_out = "leave data.tokenizer out or prepare the data with it"
    else:
        reference = card.reference
        if not is_bytes(reference):
            reference = str(Path(path).parent / reference)
            if not Path(reference).exists():
                return None
        tokenizer = load_tokenizer(reference)
        way_out = "it was changed since; restore it or prepare the data again"
    if tokenizer.fingerprint != card.fingerprint:
        raise UserError(
            f"tokenizer {tokenizer.name!r} (vocabulary {tokenizer.vocab_size}) is not the one of "
            f"data {path!r} (vocabulary {card.vocab_size}); {way_out}"
        )
    is_other = card.special and card.special != dict(tokenizer.special.ids)
    if is_other or (tokenizer.vocab_size, tokenizer.eod) != (card.vocab_size, card.eod):
        raise UserError(
            f"data card of {path!r} is damaged: it says vocabulary {card.vocab_size}, end of document "
            f"{card.eod} and {len(card.special)} reserved tokens, its tokenizer {tokenizer.vocab_size}, "
            f"{tokenizer.eod} and {len(tokenizer.special.ids)} of these ids or others; prepare the data again"
        )
    return tokenizer
