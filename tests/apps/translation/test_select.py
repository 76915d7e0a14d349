"""Codes of languages, which pairs are kept, and how messages are split."""

import math
import random

import pytest

from megamoe.apps.translation.pairs import Counts, Pair, normalize_language, select_languages
from megamoe.apps.translation.select import SPLITS, keep_pairs, overlap, split_pairs
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


def test_codes_of_languages() -> None:
    codes = {
        "DE": "de",
        "pt-br": "pt_BR",
        "sr@latin": "sr_Latn",
        "zh_hans_hk": "zh_Hans_HK",
        "es_419": "es_419",
        "de_DE.UTF-8": "de_DE",
    }
    assert {code: normalize_language(code) for code in codes} == codes
    assert {normalize_language(code) for code in ("templates", "x", "", "de-")} == {None}
    assert select_languages(["pt-br", "de"], {"de", "pt_BR", "fr"}) == ["de", "pt_BR"]
    with pytest.raises(UserError, match=r"language 'pt' is not in the data; near ones are pt_BR, pt_PT"):
        select_languages(["pt"], ["de", "pt_BR", "pt_PT"])
    with pytest.raises(UserError, match=r"language 'xx' .*there are de, fr"):
        select_languages(["xx"], ["de", "fr"])
