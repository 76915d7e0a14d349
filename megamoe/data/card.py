"""The data card `PREFIX.card.json`, which describes a prepared dataset and marks it as complete.

The card is written last, so a dataset with a card is complete. Data made by Megatron-LM's own
preprocess_data.py has none and is read without. This file also has the names of a dataset's files, and a
cheap check that .bin and .idx belong together. `verify.py` reads them whole.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from megamoe.data.blocks import MOST_BLOCK_BYTES, Count
from megamoe.data.byte_files import size_of
from megamoe.data.index_file import REMEDY, read_header
from megamoe.errors import UserError, printable
from megamoe.io import read_json, reason

CHECKSUM = "checksum"  # the card's key with the SHA-256 of everything else in it
PAIRS = ".pairs.json"  # the end of the name of the card of prepared pairs
LABELLED = ".jsonl"  # the end of the name of a file of labelled examples
LABELS = "labels.json"  # the labels of the examples in the same folder
LARGEST_CARD = 1 << 28  # bytes; each file that was read has some 200
Card = TypeVar("Card")


@dataclass
class DataFiles:
    """The names of a dataset's files; `prefix` is what the configuration's `path` names.

    counts: the file with each token id's count, int64 [vocabulary]. partial: the folder in which an
    unfinished preparation keeps its files.
    """

    prefix: Path

    def __post_init__(self) -> None:
        name = self.prefix.name
        self.bin, self.idx = self.prefix.with_name(f"{name}.bin"), self.prefix.with_name(f"{name}.idx")
        self.counts = self.prefix.with_name(f"{name}.counts.npy")
        self.tokenizer = self.prefix.with_name(f"{name}.tokenizer.json")
        self.card = self.prefix.with_name(f"{name}.card.json")
        self.partial = self.prefix.with_name(f".{name}.partial")


@dataclass(frozen=True)
class TokenizerCard:
    """The tokenizer; a relative `reference` is relative to the card's folder.

    special: the ids of its reserved tokens by name; empty in a card from before they were noted.
    """

    reference: str
    vocab_size: Count
    eod: Count
    fingerprint: str
    special: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceCard:
    """One file, or some row groups of one, that was read.

    `sha256` is of the file as it lies on disk; of a table (`tables.py`), of the documents that were taken.
    """

    name: str
    size: Count
    sha256: str
    documents: Count


@dataclass(frozen=True)
class FileCard:
    """A file of the dataset, with its size in bytes and its SHA-256."""

    size: Count
    sha256: str


@dataclass(frozen=True)
class BlockedCard(FileCard):
    """A file that is read through blocks where it lies in object storage (`blocks.py`).

    block_sums: the first 16 hexadecimal digits of the SHA-256 of each block of `block_bytes`, one after the
    other; empty in a card from before they were noted.
    """

    block_bytes: Annotated[int, Field(ge=0, le=MOST_BLOCK_BYTES)] = 0
    block_sums: str = ""


@dataclass(frozen=True)
class StepCard:
    """A step of a pipeline, such as a filter, and what it counted: documents in and out, reasons."""

    name: str
    counts: dict[str, int]


@dataclass(frozen=True)
class DataCard:
    """What was prepared, from which sources, with which tokenizer.

    `tokens` counts the end-of-document tokens too.
    """

    megamoe: str
    documents: Count
    empty_documents: Count  # skipped
    tokens: Count
    text_bytes: Count  # of the documents, as UTF-8
    dtype: str  # of a token in the .bin
    tokenizer: TokenizerCard
    num_sources: Count
    sources_sha256: str  # over the sources' sha256, in order
    sources: list[SourceCard]
    bin: BlockedCard
    idx: FileCard
    largest_token: Count | None = None  # id that occurs; None: the card is from before it was noted
    skipped: dict[str, int] = field(default_factory=dict)  # by reason, beside the empty ones
    shuffled: int | None = None  # the seed that the documents were shuffled by
    steps: list[StepCard] = field(default_factory=list)  # of the pipeline that gave the documents, if one did


def save_checked(content: dict[str, Any], path: Path) -> None:
    """Write a card as JSON, with a checksum over its content."""
    content[CHECKSUM] = _checksum(content)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _checksum(content: dict[str, Any]) -> str:
    """Return the checksum of a card's JSON without its own entry. Whitespace and order do not matter."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def load_card(prefix: str) -> DataCard | None:
    """Return the card of the dataset `prefix`, or None if it has none.

    A card without a checksum, or without `largest_token`, is from an earlier version and is read as well.

    Raises:
        UserError: if the card cannot be read or was changed, or if the preparation was not finished.
    """
    files = DataFiles(Path(prefix))
    if not files.card.exists():
        if files.partial.exists():
            raise UserError(f"data {prefix!r} is unfinished: an interrupted preparation; prepare it again")
        return None
    return load_checked(files.card, DataCard)


def load_checked(path: Path, kind: type[Card]) -> Card:
    """Read a card that `save_checked` wrote, as an instance of the dataclass `kind`.

    Raises:
        UserError: if it cannot be read, has not the fields of `kind`, or does not fit its checksum.
    """
    name = f"data card {str(path)!r}"
    try:
        content = read_json(path, LARGEST_CARD)
        card: Card = TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise UserError(f"{name} is broken: {printable(reason(error))}; prepare the data again") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {reason(error)}; prepare the data again") from error
    if not fits_checksum(content):
        raise UserError(
            f"{name} is damaged: its content does not fit its {CHECKSUM!r}; prepare the data again, or, "
            "if you have edited the card, remove that entry"
        )
    return card


def fits_checksum(content: dict[str, Any]) -> bool:
    """Return whether the content of a card fits its checksum, if it has one."""
    return bool(content.get(CHECKSUM, expected := _checksum(content)) == expected)


@dataclass
class PairFiles:
    """The names of a split's files; `prefix` is such as `data/catalogues/pairs/train`."""

    prefix: Path

    def __post_init__(self) -> None:
        name = self.prefix.name
        self.source = DataFiles(self.prefix.with_name(f"{name}.source"))
        self.target = DataFiles(self.prefix.with_name(f"{name}.target"))
        self.card = self.prefix.with_name(f"{name}{PAIRS}")


def is_pairs(prefix: str) -> bool:
    """Return whether a path names prepared pairs, and no dataset of .bin/.idx."""
    return PairFiles(Path(prefix)).card.exists() and not DataFiles(Path(prefix)).idx.exists()


def datasets_of(prefix: str) -> list[str]:
    """Return the datasets of .bin/.idx that a path names: both sides of pairs, otherwise the path itself."""
    files = PairFiles(Path(prefix))
    return [str(files.source.prefix), str(files.target.prefix)] if is_pairs(prefix) else [prefix]


def check_files(prefix: str, card: DataCard | None) -> None:
    """Check that .bin and .idx exist, belong together and have the sizes that index and card demand.

    Reads a few bytes whatever the size of the data.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    files = DataFiles(Path(prefix))
    for path in (files.bin, files.idx):
        if size_of(path) is None:
            if Path(prefix + PAIRS).is_file():
                raise UserError(f"data {prefix!r} is a dataset of pairs; name a side: {prefix}.source")
            raise UserError(f"data {prefix!r}: no file {str(path)!r}; prepare it with tools/prepare_data.py")
    header, expected = read_header(files.idx)
    sizes = [(files.bin, expected)]
    if card:
        sizes += [(files.bin, card.bin.size), (files.idx, card.idx.size)]
    for path, size in sizes:
        found = size_of(path)
        if found is not None and found != size:
            what = "truncated" if found < size else "too long"
            raise UserError(f"data file {str(path)!r} is {what}: {found} bytes, expected {size}; {REMEDY}")
    for what, of_index, of_card in (
        ("sequences", header.num_sequences, card.documents if card else None),
        ("tokens of dtype", header.dtype, card.dtype if card else None),
    ):
        if of_card not in (None, of_index):
            raise UserError(
                f"data index {str(files.idx)!r} has {what} {of_index}, its card says {of_card}; {REMEDY}"
            )
