"""A classification task from labelled pairs: which application or module does a message come from?

It is tuned on English and tested in every language. `megamoe/data/labels.py` reads it: one JSON object a line
with `text`, `label` and `language`, and `labels.json` with the labels' names in their order.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megamoe import __version__
from megamoe.data.card import save_checked
from megamoe.data.parallel_text.pair import Pair
from megamoe.data.parallel_text.select import in_split, uniform
from megamoe.data.write import file_card

LABELS_FILE = "labels.json"
LEAST_LABELS = 2


def write_labels(
    pairs: Sequence[Pair],
    splits: Sequence[str],
    source_language: str,
    min_examples: int,
    folder: Path,
    most: Mapping[str, int] | None = None,
) -> list[str]:
    """Write train.jsonl, valid.jsonl and test.LANGUAGE.jsonl; return the labels, sorted.

    Training and validation texts are the sources, in the source language. The test sets are the test split's
    sources, and for each language their translations. A text with several labels is left out, and so is a
    label with fewer than `min_examples` training texts. Nothing is written for fewer than two labels.

    most: by split, how many texts of a label are kept in each of its sets; None: all. They are drawn by a
    hash of the source, so that the sets of all languages have the same messages.
    """
    labels_of: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        labels_of[pair.source].add(pair.label)
    unique = {source: min(labels) for source, labels in labels_of.items() if len(labels) == 1}
    counts = Counter(_sources(in_split(pairs, splits, "train"), unique).values())
    labels = sorted(label for label, number in counts.items() if label and number >= min_examples)
    if len(labels) < LEAST_LABELS:
        return []
    folder.mkdir()
    sets = _sets(pairs, splits, source_language, unique)
    if most is not None:
        source_of = {pair.target: pair.source for pair in in_split(pairs, splits, "test")}
        sets = {
            name: _at_most(most[name.partition(".")[0]], label_of, source_of)
            for name, label_of in sets.items()
        }
        counts = Counter(sets["train"].values())
    content = {}
    for name, label_of in sets.items():
        language = name.partition(".")[2] or source_language
        lines = [
            json.dumps({"text": text, "label": label, "language": language}, ensure_ascii=False)
            for text, label in label_of.items()
            if label in labels
        ]
        if not lines:
            continue
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        file = file_card(path)
        content[path.name] = {"examples": len(lines), "size": file.size, "sha256": file.sha256}
    save_checked(
        {
            "megamoe": __version__,
            "labels": labels,
            "train": {one: counts[one] for one in labels},
            "files": content,
        },
        folder / LABELS_FILE,
    )
    return labels


def _sets(
    pairs: Sequence[Pair], splits: Sequence[str], source_language: str, unique: dict[str, str]
) -> dict[str, dict[str, str]]:
    """Return the label of each text, by set."""
    sets: dict[str, dict[str, str]] = {
        "train": _sources(in_split(pairs, splits, "train"), unique),
        "valid": _sources(in_split(pairs, splits, "valid"), unique),
        f"test.{source_language}": _sources(in_split(pairs, splits, "test"), unique),
    }
    for pair in in_split(pairs, splits, "test"):
        if pair.source in unique:
            sets.setdefault(f"test.{pair.language}", {})[pair.target] = unique[pair.source]
    return sets


def _at_most(number: int, label_of: dict[str, str], source_of: Mapping[str, str]) -> dict[str, str]:
    """Return so many texts of each label, in their order."""
    drawn: dict[str, list[str]] = defaultdict(list)
    for text in sorted(label_of, key=lambda text: uniform(source_of.get(text, text))):
        drawn[label_of[text]].append(text)
    kept = {text for texts in drawn.values() for text in texts[:number]}
    return {text: label for text, label in label_of.items() if text in kept}


def _sources(pairs: Iterable[Pair], unique: dict[str, str]) -> dict[str, str]:
    """Return the label of each source that has one label, in the order of the pairs."""
    return {pair.source: unique[pair.source] for pair in pairs if pair.source in unique}
