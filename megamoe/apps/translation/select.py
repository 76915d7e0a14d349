"""Which pairs are kept, and which split each belongs to."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from megamoe.apps.translation.pairs import SPLITS, Counts, Pair, select_languages
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
