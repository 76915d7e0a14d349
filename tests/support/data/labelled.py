"""A small classification task for the tests: two labels by letters, lengths of 3 to 21, four sets."""

import json
from pathlib import Path
from typing import Any

from megamoe.config import RunConfig
from tests.support.tiny import tiny

LABELS = ["a_words", "b_words", "unused"]


def make_labels(folder: Path) -> Path:
    """Write labels.json, train, valid and two test sets; return the folder of them."""
    output = folder / "labels"
    output.mkdir(parents=True)
    (output / "labels.json").write_text(json.dumps({"labels": LABELS}))
    for name, first, size in (("train", 0, 37), ("valid", 5, 11), ("test.en", 9, 5), ("test.de", 2, 13)):
        write(
            output / f"{name}.jsonl",
            [(text(number), LABELS[number % 2]) for number in range(first, first + size)],
        )
    return output


def labelled_config(train: Path, objective: dict[str, Any], outputs: int, *overrides: str) -> RunConfig:
    """A tiny encoder that learns a task from a file of examples."""
    return tiny(
        "data.mock=false",
        f"data.sources=[{train}]",
        "data.tokenizer=bytes",
        "data.sequence_length=32",
        "model.vocab_size=null",
        "model.architecture=encoder",
        f"model.num_labels={outputs}",
        f"train.objective={objective}",
        *overrides,
    )


def text(number: int) -> str:
    """A text of as many letters as the number says, and which letters: those of its label."""
    return ("ab"[number % 2] + "xyz"[number % 3]) * (1 + number % 10) + str(number % 7)


def write(path: Path, texts: list[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"text": each, "label": label}) + "\n" for each, label in texts))
