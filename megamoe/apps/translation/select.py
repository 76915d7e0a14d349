"""Which pairs are kept, which split each belongs to, and a classification task from labelled pairs."""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from megamoe import __version__
from megamoe.apps.prepare.write import file_card
from megamoe.apps.translation.pairs import SPLITS, Counts, Pair, select_languages
from megamoe.data.card import save_checked
from megamoe.errors import UserError

WORD = re.compile(r"\w+")
NOT_WORD = re.compile(r"[\W_]+")


def keep_pairs(
    pairs: Iterable[Pair],
    counts: Counts,
    *,
    source_language: str,
    languages: Sequence[str] = (),
    min_words: int = 1,
    min_pairs: int = 1,
) -> list[Pair]:
    """Return the pairs that are kept, sorted by language, in the order in which they were read.

    Left out: pairs into the source language, pairs of a source with fewer than `min_words` words, pairs
    whose target is the source itself, the second and later of equal pairs, and languages with fewer than
    `min_pairs` of the remaining pairs. `languages`: the only ones to keep; empty: all.

    Raises:
        UserError: if nothing remains, or if a wanted language does not occur.
    """
    by_language: dict[str, dict[tuple[str, str], Pair]] = {}
    for pair in pairs:
        reason = _why_not(pair, source_language, min_words)
        kept = by_language.setdefault(pair.language, {})
        if reason is None and (pair.source, pair.target) in kept:
            reason = "equal to another pair"
        if reason is None:
            kept[pair.source, pair.target] = pair
        else:
            counts.left_out[reason] += 1
    known = [language for language, kept in by_language.items() if kept]
    wanted = select_languages(languages, known) if languages else sorted(known)
    result: list[Pair] = []
    for language in wanted:
        if len(by_language[language]) >= min_pairs:
            result += by_language[language].values()
        else:
            counts.left_out[f"of a language with fewer than {min_pairs} pairs"] += len(by_language[language])
    if not result:
        reasons = ", ".join(f"{number} {reason}" for reason, number in counts.left_out.most_common(3))
        raise UserError(
            f"no pairs are left ({reasons or 'there were none'}); name other files, or lower --min-words "
            "or --min-pairs"
        )
    return result


def _why_not(pair: Pair, source_language: str, min_words: int) -> str | None:
    if pair.language == source_language:
        return "into the source language"
    if len(pair.source.split()) < min_words:
        return f"of fewer than {min_words} words"
    if pair.source == pair.target:
        return "not translated: target and source are equal"
    return None


def outside_of_ready_splits(pairs: Sequence[Pair], counts: Counts) -> list[Pair]:
    """Return the pairs without those that would be added to a language's ready-made valid or test split.

    These are drawn pairs of the same message and language as one of it, see `split_pairs`. In train they
    would be what the model is tested on, and in the split they would change a published set.
    """
    groups = _Groups.of(pairs)

    def message(pair: Pair) -> tuple[str, str]:
        return pair.language, groups.name_of(_key(pair.source))

    evaluated = {message(pair) for pair in pairs if pair.split in SPLITS[1:]}
    kept = [pair for pair in pairs if pair.split or message(pair) not in evaluated]
    if len(kept) < len(pairs):
        counts.left_out["of a message in a ready-made valid or test split"] += len(pairs) - len(kept)
    return kept


def overlap(pair: Pair) -> float:
    """Return the share of the source's words that the target has too, whatever their case; 0 to 1."""
    words = WORD.findall(pair.source.casefold())
    others = set(WORD.findall(pair.target.casefold()))
    return sum(word in others for word in words) / len(words) if words else 1.0


def split_pairs(pairs: Sequence[Pair], shares: Sequence[float]) -> list[str]:
    """Return the split of each pair: "train", "valid" or "test".

    Pairs of one message go to one split, in all languages: those with a source or an identity in common,
    compared without case, spaces and punctuation. The split is drawn by a hash of the message, so it does
    not depend on the order of the pairs. A pair of a ready-made split (`Pair.split`) stays in it. Drawn ones
    of the same message follow it, so `outside_of_ready_splits` should come before.

    shares: of the three splits, of any sum.

    Raises:
        UserError: if the shares are not three finite numbers from 0 with a first one above 0.
    """
    if len(shares) != len(SPLITS) or not all(0 <= share < math.inf for share in shares) or shares[0] == 0:
        raise UserError(
            f"split {','.join(map(str, shares))}: expected three shares, of train (more than 0), valid and "
            "test, such as 0.9,0.05,0.05"
        )
    total = sum(shares)
    bounds = [sum(shares[: place + 1]) / total for place in range(len(shares))]
    groups = _Groups.of(pairs)
    found: dict[str, str] = {}
    for pair in pairs:
        if pair.split:
            found.setdefault(groups.name_of(_key(pair.source)), pair.split)
    result = []
    for pair in pairs:
        if pair.split:
            result.append(pair.split)
            continue
        name = groups.name_of(_key(pair.source))
        if name not in found:
            number = uniform(name)
            found[name] = next(
                (split for split, bound in zip(SPLITS, bounds, strict=True) if number < bound), SPLITS[0]
            )
        result.append(found[name])
    return result


def _key(text: str) -> str:
    """Return a text without case, spaces and punctuation; a text without any word stays as it is."""
    return NOT_WORD.sub("", text.casefold()) or text


def uniform(name: str) -> float:
    """Return a number of [0, 1) that depends on a text alone."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class _Groups:
    """Sets of keys that belong together (union-find). A set's name is its smallest key."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> "_Groups":
        """Return the sets of the pairs' sources and identities, as keys."""
        groups = cls()
        for pair in pairs:
            groups.join([_key(text) for text in (pair.source, *pair.identities)])
        return groups

    def join(self, keys: Sequence[str]) -> None:
        names = {self.name_of(key) for key in keys}
        smallest = min(names)
        for name in names:
            self._parents[name] = smallest

    def name_of(self, key: str) -> str:
        path = []
        while (parent := self._parents.setdefault(key, key)) != key:
            path.append(key)
            key = parent
        for one in path:
            self._parents[one] = key
        return key


def in_split(pairs: Sequence[Pair], splits: Sequence[str], split: str) -> Iterator[Pair]:
    """Yield the pairs of one split."""
    return (pair for pair, its in zip(pairs, splits, strict=True) if its == split)


def count_languages(pairs: Iterable[Pair]) -> dict[str, int]:
    """Return the number of pairs of each language, in the order of their codes."""
    return dict(sorted(Counter(pair.language for pair in pairs).items()))


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
    sources, and for each language their translations. A text with several labels, in any split, is left out,
    and so is a label with fewer than `min_examples` training texts. Nothing is written for fewer than two
    labels.

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
        source_of = _source_of(pair for pair in in_split(pairs, splits, "test") if pair.source in unique)
        for name, label_of in sets.items():
            split, _, language = name.partition(".")
            sets[name] = _at_most(most[split], label_of, source_of.get(language, {}))
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
    labels_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for pair in pairs:
        labels_of[pair.language, pair.target].add(pair.label)
    for pair in in_split(pairs, splits, "test"):
        if pair.source in unique and len(labels_of[pair.language, pair.target]) == 1:
            sets.setdefault(f"test.{pair.language}", {})[pair.target] = unique[pair.source]
    return sets


def _source_of(pairs: Iterable[Pair]) -> dict[str, dict[str, str]]:
    """Return the source of each translation, by language; of several the one that is drawn first."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for pair in pairs:
        of_language = found[pair.language]
        known = of_language.get(pair.target, pair.source)
        of_language[pair.target] = min(known, pair.source, key=uniform)
    return found


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
