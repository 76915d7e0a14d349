"""Examples of a task: one file of JSON lines for each split and language, and beside them `labels.json`.

What a line holds is the objective's matter, such as `{"text": ..., "label": ...}`; other keys are not read.
`labels.json` lists the labels in the order of their numbers, and may have the checksums of the files. A task
without labels, such as a regression, needs none.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe.config.schema import DataConfig
from megamoe.data.card import LABELLED, LABELS, FileCard, load_checked
from megamoe.data.tokenizers import load_tokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.io import parse_json, read_plain, reason

ENDING = LABELLED
NO_TAG = ""  # the predicted tag of a word without a label; no label has this name
LARGEST = 4 << 30  # bytes of a file of examples
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # in the folder above the labels'
REMEDY = "prepare the labels again"


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
class Line:
    """A line's object, and where it stands: the beginning of a message about it."""

    where: str
    content: Any


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


def label_vocabulary(data: DataConfig, model_vocab_size: int | None) -> Vocabulary:
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


def read_lines(path: str) -> list[Line]:
    """Return the lines of a file that are not empty.

    Raises:
        UserError: naming the file, and the line if one is broken.
    """
    try:
        content = read_plain(Path(path), LARGEST)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"data {path!r} cannot be read: {reason(error)}; {REMEDY}") from None
    labels = Path(path).with_name(LABELS)
    known = load_checked(labels, LabelCard).files.get(Path(path).name) if labels.exists() else None
    if known is not None and hashlib.sha256(content).hexdigest() != known.sha256:
        raise UserError(f"data {path!r} is damaged or was changed: {LABELS} has another SHA-256; {REMEDY}")
    found = [
        _parsed(f"data {path!r}, line {place}", line)
        for place, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not found:
        raise UserError(f"data {path!r} has no examples; {REMEDY}")
    return found


def _parsed(where: str, line: str) -> Line:
    try:
        return Line(where, parse_json(line))
    except ValueError:
        raise UserError(f"{where}: no JSON; {REMEDY}") from None
