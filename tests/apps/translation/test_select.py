"""Which pairs are kept, how messages are split, and the classification task."""

import json
import math
import random
from pathlib import Path

import pytest

from megamoe.apps.translation.pairs import Counts, Pair
from megamoe.apps.translation.select import SPLITS, keep_pairs, overlap, split_pairs, write_labels
from megamoe.errors import UserError


def test_pairs_that_are_left_out() -> None:
    good = Pair("a good pair", "ein gutes Paar", "de")
    pairs = [
        good,
        Pair("a good pair", "ein gutes Paar", "de", "another module"),
        Pair("a good pair", "ein anderes Paar", "de"),
        Pair("too short", "zu kurz", "de"),
        Pair("not at all translated", "not at all translated", "de"),
        Pair("in the same language", "the same language", "en"),
        Pair("one of a rare language", "x", "tlh"),
        Pair("another good pair", "une bonne paire", "fr"),
        Pair("one more good pair", "une paire", "fr"),
    ]
    counts = Counts()
    kept = keep_pairs(pairs, counts, source_language="en", min_words=3, min_pairs=2)
    assert kept == [good, pairs[2], *pairs[7:]]
    assert counts.left_out == {
        "equal to another pair": 1,
        "of fewer than 3 words": 1,
        "not translated: target and source are equal": 1,
        "into the source language": 1,
        "of a language with fewer than 2 pairs": 1,
    }
    assert keep_pairs(pairs, Counts(), source_language="en", languages=["FR"]) == pairs[7:]
    with pytest.raises(UserError, match=r"no pairs are left \(.*lower --min-words"):
        keep_pairs(pairs, Counts(), source_language="en", min_words=9)


def test_overlap_is_the_share_of_the_sources_words() -> None:
    assert overlap(Pair("The file {name} is gone", "Datei {name} fehlt", "de")) == 1 / 5
    assert overlap(Pair("Django version 5", "django-Version 5", "de")) == 1
    assert overlap(Pair("one two two", "TWO", "de")) == 2 / 3
    assert overlap(Pair("%: %", "% - %", "de")) == 1  # no words: a copy


def test_no_message_is_in_two_splits() -> None:
    rng = random.Random(0)
    pairs = []
    for number in range(3000):
        text = f"message {number // 2} of many"
        variants = [text, f"{text}!", f" {text.upper()}"]
        pairs.append(Pair(rng.choice(variants), "x", rng.choice(["de", "fr"]), identities=(f"key {number}",)))
    splits = split_pairs(pairs, [0.8, 0.1, 0.1])
    found: dict[str, set[str]] = {}
    for pair, split in zip(pairs, splits, strict=True):
        found.setdefault(pair.source.lower().strip(" !"), set()).add(split)
    assert {len(each) for each in found.values()} == {1}
    assert [splits.count(split) / 3000 for split in SPLITS] == pytest.approx([0.8, 0.1, 0.1], abs=0.03)
    # The order plays no part, nor do the other shares' names: the same message, the same split.
    order = rng.sample(range(3000), 3000)
    again = split_pairs([pairs[place] for place in order], [8, 1, 1])
    assert again == [splits[place] for place in order]


def test_identities_join_messages() -> None:
    def splits_of(*identities: tuple[str, ...]) -> set[str]:
        pairs = [Pair(f"text {number}", "x", "de", "", one) for number, one in enumerate(identities)]
        return set(split_pairs(pairs, [0.34, 0.33, 0.33]))

    assert len(splits_of(*[("same",)] * 40)) == 1
    assert len(splits_of(*[(f"key {number}", f"key {number + 1}") for number in range(40)])) == 1  # a chain
    assert len(splits_of(*[()] * 40)) == 3


@pytest.mark.parametrize("shares", [[1.0], [0.0, 0.5, 0.5], [1, -1, 1], [math.nan, 0, 0], [1, math.inf, 0]])
def test_wrong_shares(shares: list[float]) -> None:
    with pytest.raises(UserError, match="expected three shares"):
        split_pairs([], shares)


def test_labels(tmp_path: Path) -> None:
    pairs = [
        Pair(f"{label} {n}", f"{language} {label} {n}", language, label)
        for language in ("de", "fr")
        for label in ("shop", "blog", "rare")
        for n in range(3 if label == "rare" else 30)
    ]
    pairs.append(Pair("shop 1", "zweimal", "de", "blog"))  # two labels: left out
    splits = split_pairs(pairs, [0.6, 0.2, 0.2])
    assert write_labels(pairs, splits, "en", 10, tmp_path / "labels") == ["blog", "shop"]
    card = json.loads((tmp_path / "labels" / "labels.json").read_text())
    assert card["labels"] == ["blog", "shop"]
    sets = ("test.de", "test.en", "test.fr", "train", "valid")
    assert sorted(card["files"]) == [f"{name}.jsonl" for name in sets]
    split_of = {pair.source: split for pair, split in zip(pairs, splits, strict=True)}
    for name, facts in card["files"].items():
        examples = [json.loads(line) for line in (tmp_path / "labels" / name).read_text().splitlines()]
        assert len(examples) == facts["examples"]
        language = name.split(".")[1] if name.startswith("test") else "en"
        sources = {one["text"].removeprefix(f"{language} ") for one in examples}
        wanted = {
            source
            for source, split in split_of.items()
            if split == name.split(".")[0] and source != "shop 1" and not source.startswith("rare")
        }
        assert sources == wanted
        assert all(one["label"] in one["text"] and one["language"] == language for one in examples)
    assert write_labels(pairs, splits, "en", 1000, tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_a_translation_with_several_labels_is_left_out(tmp_path: Path) -> None:
    """A word of two messages with different labels, one of them perhaps in training."""
    pairs = [
        Pair("open a file", "öffnen", "de", "editor"),
        Pair("unlock", "öffnen", "de", "bank"),
        Pair("open a file", "ouvrir", "fr", "editor"),
        Pair("save", "sichern", "de", "editor"),
        Pair("secure", "sichern", "de", "bank"),
        Pair("close", "schließen", "de", "editor"),
        Pair("close it", "schließen", "de", "editor"),
        *(Pair(f"{label} {n}", "x", "de", label) for label in ("editor", "bank") for n in range(3)),
    ]
    splits = ["test"] * 4 + ["train"] + ["test"] * 2 + ["train"] * 6
    assert write_labels(pairs, splits, "en", 3, tmp_path / "labels") == ["bank", "editor"]

    def texts(language: str) -> list[str]:
        path = tmp_path / "labels" / f"test.{language}.jsonl"
        return [json.loads(line)["text"] for line in path.read_text().splitlines()]

    assert (texts("de"), texts("fr")) == (["schließen"], ["ouvrir"])
    assert texts("en") == ["open a file", "unlock", "save", "close", "close it"]


def test_a_translation_of_several_messages_is_drawn_with_the_first_of_them(tmp_path: Path) -> None:
    """In each language by its own messages, though languages have words in common."""
    pairs = [
        Pair(f"{label} {n}", f"{label} word {n // 2 + shift}", language, label)
        for label in ("shop", "blog")
        for language, shift in (("de", 0), ("fr", 3))
        for n in range(40)
    ]
    train = [Pair(f"{label} train {n}", "x", "de", label) for label in ("shop", "blog") for n in range(3)]
    splits = ["test"] * len(pairs) + ["train"] * len(train)
    most = {"train": 9, "valid": 9, "test": 8}
    write_labels([*pairs, *train], splits, "en", 3, tmp_path / "labels", most)

    def numbers(language: str) -> set[tuple[str, int]]:
        path = tmp_path / "labels" / f"test.{language}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {(row["label"], int(row["text"].rpartition(" ")[2])) for row in rows}

    english = {(label, number // 2) for label, number in numbers("en")}
    assert english <= numbers("de")
    assert {(label, number + 3) for label, number in english} <= numbers("fr")


def test_at_most_so_many_texts_of_a_label(tmp_path: Path) -> None:
    """The same messages in all languages; a label with fewer keeps all."""
    pairs, splits = [], []
    for language in ("de", "fr"):
        for number in range(60):
            label = "shop" if number % 6 else "blog"
            pairs.append(Pair(f"message {number}", f"{language} {number}", language, label))
            splits.append("train" if number < 30 else "test")
    most = {"train": 8, "valid": 1, "test": 7}
    assert write_labels(pairs, splits, "en", 5, tmp_path / "labels", most) == ["blog", "shop"]

    def numbers(name: str) -> dict[str, list[str]]:
        lines = map(json.loads, (tmp_path / "labels" / f"{name}.jsonl").read_text().splitlines())
        found: dict[str, list[str]] = {}
        for line in lines:
            found.setdefault(line["label"], []).append(line["text"].split()[1])
        return found

    assert {label: len(found) for label, found in numbers("train").items()} == {"blog": 5, "shop": 8}
    assert {label: len(found) for label, found in numbers("test.en").items()} == {"blog": 5, "shop": 7}
    assert numbers("test.en") == numbers("test.de") == numbers("test.fr")
    assert json.loads((tmp_path / "labels" / "labels.json").read_text())["train"] == {"blog": 5, "shop": 8}
