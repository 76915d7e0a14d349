"""The data card `PREFIX.card.json`: what a prepared dataset holds, and that it is complete.

The card is written last, so a dataset with a card is whole. Data made by Megatron-LM's own
preprocess_data.py has none and is read without. Beside the card this file knows the names of a
dataset's files, and how to tell cheaply that .bin and .idx belong together.
"""

import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megamoe.errors import UserError
from megamoe.plain_files import read_plain, reason

LARGEST_CARD = 1 << 28  # bytes; each file that was read has some 200
# .idx: magic, version, dtype code, number of sequences, number of document boundaries.
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
# Megatron-Core's DType codes and their bytes a token.
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


@dataclass(frozen=True)
class DataFiles:
    """The names of a dataset's files; `prefix` is what the configuration's `path` names."""

    prefix: Path

    def _with(self, ending: str) -> Path:
        return self.prefix.with_name(self.prefix.name + ending)

    @property
    def bin(self) -> Path:
        return self._with(".bin")

    @property
    def idx(self) -> Path:
        return self._with(".idx")

    @property
    def counts(self) -> Path:
        """How often each token id occurs: int64 [vocabulary]."""
        return self._with(".counts.npy")

    @property
    def tokenizer(self) -> Path:
        return self._with(".tokenizer.json")

    @property
    def card(self) -> Path:
        return self._with(".card.json")

    @property
    def partial(self) -> Path:
        """The folder in which an unfinished preparation keeps its files."""
        return self.prefix.with_name(f".{self.prefix.name}.partial")


@dataclass(frozen=True)
class TokenizerCard:
    """The tokenizer; a relative `reference` is relative to the card's folder."""

    reference: str
    vocab_size: int
    eod: int
    fingerprint: str


@dataclass(frozen=True)
class SourceCard:
    """One file that was read; `sha256` is of the file as it lies on disk."""

    name: str
    size: int
    sha256: str
    documents: int


@dataclass(frozen=True)
class FileCard:
    """A file of the dataset: bytes and sha256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class DataCard:
    """What was prepared, from what, with what. `tokens` counts the end-of-document tokens too."""

    megamoe: str
    documents: int
    empty_documents: int  # skipped
    tokens: int
    text_bytes: int  # of the documents, as UTF-8
    dtype: str  # of a token in the .bin
    tokenizer: TokenizerCard
    num_sources: int
    sources_sha256: str  # over the sources' sha256, in order
    sources: list[SourceCard]
    bin: FileCard
    idx: FileCard

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def load_card(prefix: str) -> DataCard | None:
    """The card of the dataset `prefix`, None if it has none.

    Raises:
        UserError: if the card cannot be read, or if the preparation was not finished.
    """
    files = DataFiles(Path(prefix))
    if not files.card.exists():
        if files.partial.exists():
            raise UserError(f"data {prefix!r} is unfinished: an interrupted preparation; prepare it again")
        return None
    try:
        return TypeAdapter(DataCard).validate_json(read_plain(files.card, LARGEST_CARD))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise UserError(
            f"data card {str(files.card)!r} is broken: {where}: {first['msg']}; prepare the data again"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"data card {str(files.card)!r} cannot be read: {reason(error)}") from error


def check_files(prefix: str, card: DataCard | None) -> None:
    """Check that .bin and .idx exist, belong together and have the sizes that index and card demand.

    Reads a few bytes whatever the size of the data.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    files = DataFiles(Path(prefix))
    for path in (files.bin, files.idx):
        if not path.is_file():
            raise UserError(f"data {prefix!r}: no file {str(path)!r}; prepare it with tools/prepare_data.py")
    expected = _size_of_bin(files.idx)
    for path, size in ((files.bin, expected), *_sizes_in_card(files, card)):
        found = path.stat().st_size
        if found != size:
            what = "truncated" if found < size else "too long"
            raise UserError(
                f"data file {str(path)!r} is {what}: {found} bytes, expected {size}; prepare the data again"
            )


def _sizes_in_card(files: DataFiles, card: DataCard | None) -> list[tuple[Path, int]]:
    return [(files.bin, card.bin.size), (files.idx, card.idx.size)] if card else []


def _size_of_bin(idx: Path) -> int:
    """Bytes of the .bin that this .idx describes: where its last sequence ends."""
    broken = f"data index {str(idx)!r} is"
    with open(idx, "rb") as file:
        header = file.read(INDEX_HEADER.size)
        if len(header) < INDEX_HEADER.size:
            raise UserError(f"{broken} truncated: {len(header)} bytes; prepare the data again")
        magic, version, code, num_sequences, num_boundaries = INDEX_HEADER.unpack(header)
        if magic != INDEX_MAGIC or version != 1 or code not in TOKEN_BYTES:
            raise UserError(f"{broken} no Megatron-Core index (version 1) of token ids; prepare it again")
        lengths_end = INDEX_HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        size, expected = os.fstat(file.fileno()).st_size, pointers_end + 8 * num_boundaries
        if size != expected:
            what = "truncated" if size < expected else "too long"
            raise UserError(f"{broken} {what}: {size} bytes, expected {expected}; prepare the data again")
        if num_sequences == 0:
            raise UserError(f"{broken} empty: it lists no document; prepare the data again")
        file.seek(lengths_end - 4)
        last_length = int.from_bytes(file.read(4), "little")
        file.seek(pointers_end - 8)
        last_pointer = int.from_bytes(file.read(8), "little")
    return last_pointer + last_length * TOKEN_BYTES[code]
