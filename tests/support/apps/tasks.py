"""Small tasks of every kind for the tests: texts of two letters, tags by first letters, answers of digits."""

import json
from pathlib import Path
from typing import Any

import yaml

Rows = list[dict[str, Any]]


def text(number: int) -> str:
    """A text whose letters say its label, with a length that depends on the number."""
    return ("ab"[number % 2] + "xyz"[number % 3]) * (1 + number % 5) + " " + str(number % 7)


def classification(first: int, size: int) -> Rows:
    return [{"text": text(n), "label": ["no", "yes"][n % 2]} for n in range(first, first + size)]


def pairs(first: int, size: int) -> Rows:
    return [
        {"one": text(n), "two": text(n + n % 3), "gold": int(n % 3 == 0)} for n in range(first, first + size)
    ]


def regression(first: int, size: int) -> Rows:
    return [{"text": text(n), "label": n % 5 / 2} for n in range(first, first + size)]


def tagging(first: int, size: int) -> Rows:
    found = []
    for n in range(first, first + size):
        words = [f"{'ab'[(n + k) % 2]}{'xyz'[k % 3]}"[: 1 + k % 2] for k in range(1 + n % 4)]
        found.append({"words": words, "tags": [{"a": "A", "b": "B"}[word[0]] for word in words]})
    return found


def answers(first: int, size: int) -> Rows:
    found = []
    for n in range(first, first + size):
        context = "ab" * (n % 3) + " the " + str(100 + n) + " xy"
        answer = {"text": [str(100 + n)], "answer_start": [context.index(str(100 + n))]}
        found.append({"question": "xyz"[n % 3], "context": context, "answers": answer})
    return found


MAKERS = {
    "classification": classification,
    "pairs": pairs,
    "regression": regression,
    "tagging": tagging,
    "question_answering": answers,
}
# Deterministic at every layout: no dropout, and micro batches of one size.
SETTINGS: dict[str, Any] = {
    "seeds": [1],
    "epochs": 1,
    "batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 1e-3,
    "dropout": 0.0,
    "tokenizer": "bytes",
    "evaluation_batch_size": 4,
}


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_task(folder: Path, name: str, **changes: Any) -> Path:
    """Write the files of a task and its task file, whose path is returned; a key that is None is left out."""
    make, folder = MAKERS[name], folder / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, first, size in (("train", 0, 12), ("valid", 3, 5), ("test.en", 5, 3), ("test.de", 8, 7)):
        write_jsonl(folder / f"{split}.jsonl", make(first, size))
    tree: dict[str, Any] = {
        "name": name,
        "kind": "classification" if name == "pairs" else name,
        "train": str(folder / "train.jsonl"),
        "valid": str(folder / "valid.jsonl"),
        "test": str(folder / "test.*.jsonl"),
        **SETTINGS,
    }
    if name == "pairs":
        tree["columns"] = {"text": "one", "second": "two", "label": "gold"}
    tree = {key: value for key, value in {**tree, **changes}.items() if value is not None}
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
