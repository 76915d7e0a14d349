"""Texts with labels: `labels.json`, and beside it one file of JSON lines for each split and language.

A line is `{"text": ..., "label": ...}`; other keys are not read. `labels.json` lists the labels in the order
of their numbers, and the checksums of the files (tools/prepare_pairs.py, `parallel_text/labels.py`).
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megamoe.data.card import FileCard, load_checked
from megamoe.data.tokenizers import load_tokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError, printable
from megamoe.plain_files import read_plain, reason

if TYPE_CHECKING:
    from megamoe.config.schema import DataConfig

LABELS = "labels.json"
ENDING = ".jsonl"
LARGEST = 4 << 30  # bytes of a file of texts
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # that tools/prepare_pairs.py writes above the labels
AGAIN = "prepare the labels again with tools/prepare_pairs.py"


@dataclass(frozen=True)
class LabelFile(FileCard):
    """A file of texts, with their number."""

    examples: int


@dataclass(frozen=True)
class LabelCard:
    """What `labels.json` says: the labels in the order of their numbers, and the files by name.

    train: the number of training texts of each label. A card that was written by hand may lack all but the
    labels; its files are then not compared with checksums.
    """

    labels: list[str]
    megamoe: str = ""
    train: dict[str, int] = field(default_factory=dict)
    files: dict[str, LabelFile] = field(default_factory=dict)


@dataclass(frozen=True)
class LabelledTexts:
    """The texts of a file as int64 tokens, without an end, and their labels' numbers, in the file's order."""

    tokens: list[np.ndarray]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)


def load_label_card(path: str) -> LabelCard:
    """Return the card beside a file of texts.

    Raises:
        UserError: if it is missing or broken, or names fewer than two labels or one twice.
    """
    card = load_checked(Path(path).with_name(LABELS), LabelCard)
    if len(set(card.labels)) < max(2, len(card.labels)):
        raise UserError(
            f"data {str(Path(path).with_name(LABELS))!r}: {len(card.labels)} labels, of which "
            f"{len(set(card.labels))} differ; expected at least 2, each once"
        )
    return card


def label_vocabulary(data: "DataConfig", model_vocab_size: int | None) -> Vocabulary:
    """Return the vocabulary of `data.tokenizer`, or of the tokenizer in the folder above the labels'.

    Raises:
        UserError: if there is no tokenizer, it cannot be read, or the model's vocabulary is smaller.
    """
    reference = data.tokenizer or _tokenizer_above(data.sources[0].path)
    tokenizer = load_tokenizer(reference)
    if model_vocab_size is not None and model_vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {model_vocab_size} is smaller than the tokenizer's vocabulary, "
            f"{tokenizer.vocab_size}; raise it or leave it out"
        )
    return Vocabulary(model_vocab_size or tokenizer.vocab_size, tokenizer.eod, tokenizer, tokenizer.special)


def _tokenizer_above(path: str) -> str:
    folder = Path(path).parent.parent
    found = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    if not found:
        raise UserError(
            f"data.sources: {path!r} holds texts, and there is no {' or '.join(TOKENIZERS)} in "
            f"{str(folder)!r}; give data.tokenizer"
        )
    return str(found[0])


def read_texts(path: str, tokenizer: str) -> LabelledTexts:
    """Return the texts of a file, encoded by the tokenizer of that name. Files are read once.

    Raises:
        UserError: naming the file, and the line if one is broken.
    """
    card = load_label_card(path)
    try:
        stamp = Path(path).stat()
    except OSError as error:
        raise UserError(f"data {path!r} cannot be read: {error.strerror}; {AGAIN}") from None
    known = card.files.get(Path(path).name)
    return _read(
        path, tokenizer, tuple(card.labels), known.sha256 if known else "", stamp.st_mtime_ns, stamp.st_size
    )


@lru_cache(maxsize=256)
def _read(
    path: str, tokenizer: str, labels: tuple[str, ...], sha256: str, _changed_ns: int, _size: int
) -> LabelledTexts:
    try:
        content = read_plain(Path(path), LARGEST)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"data {path!r} cannot be read: {reason(error)}; {AGAIN}") from None
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"data {path!r} is damaged or was changed: {LABELS} has another SHA-256; {AGAIN}")
    numbers = {label: number for number, label in enumerate(labels)}
    lines = enumerate(text.split("\n"), 1)
    pairs = [_parsed(path, place, line, numbers) for place, line in lines if line.strip()]
    if not pairs:
        raise UserError(f"data {path!r} has no texts; {AGAIN}")
    encoded = load_tokenizer(tokenizer).encode_batch([text for text, _ in pairs])
    return LabelledTexts([np.array(ids, dtype=np.int64) for ids in encoded], [label for _, label in pairs])


def _parsed(path: str, place: int, line: str, numbers: dict[str, int]) -> tuple[str, int]:
    """Return the text of a line and the number of its label."""
    where = f"data {path!r}, line {place}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: no JSON; {AGAIN}") from None
    text, label = (found.get(key) if isinstance(found, dict) else None for key in ("text", "label"))
    if not isinstance(text, str) or not isinstance(label, str):
        raise UserError(f'{where}: expected {{"text": ..., "label": ...}} with two strings')
    if label not in numbers:
        raise UserError(f"{where}: the label {printable(label, 60)} is not in {LABELS}; {AGAIN}")
    if not text.strip():
        raise UserError(f"{where}: the text is empty; remove the line")
    return text, numbers[label]
