"""Pairs of sequences for translation, by number.

Interface for an objective:

- `PairDataset(prefix, vocabulary, options)` is map-style. An item is a dict of `source` (int64 [S]: the tag
  of the target's language, the tokens, end-of-document), `target` (int64 [T]: the tokens, end-of-document)
  and `language` (int64 [], the number of the pair's group in `PairDataset.groups`, such as "en-de").
- `OrderedPairs` is a map-style dataset of batches, epoch after epoch. Their plan depends on the lengths of
  the pairs, the seed and the epoch alone, and knows no ranks. Batches go to the ranks in turn, so one rank
  sees in order what n ranks see together, and a run goes on at exactly the batch where it stopped.
"""

import bisect
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from megamoe.apps.prepare.write import lengths_of
from megamoe.apps.translation.card import LanguageCard, PairCard, load_pair_card
from megamoe.apps.translation.pairs import select_languages
from megamoe.config.schema import DataConfig
from megamoe.data.byte_files import open_bytes
from megamoe.data.card import DataFiles, PairFiles
from megamoe.data.index_file import check_arithmetic
from megamoe.data.verify import verify_sources
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError

Direction = Literal["from", "into", "both"]
Tag = Literal["source", "target", "none"]
TooLong = Literal["error", "truncate", "drop"]
LEAST_LENGTH = 3  # a tag, a token and the end


@dataclass(frozen=True)
class PairOptions:
    """Which pairs are read, and how.

    Attributes:
        languages: those to keep beside the source language; empty: all.
        direction: `from` the source language, `into` it, or `both`.
        tag: where the target language's tag, such as <2de>, stands: first in the source (Johnson et al. 2017,
            section 3), first in the target, or nowhere.
        max_length: of either side in tokens, with tag and end-of-document token; None: any.
        too_long: what becomes of longer pairs: an error, a cut before the end-of-document token, or none.
    """

    languages: tuple[str, ...] = ()
    direction: Direction = "from"
    tag: Tag = "source"
    max_length: int | None = None
    too_long: TooLong = "error"


def directions(
    card: PairCard, languages: Iterable[str], direction: Direction
) -> list[tuple[LanguageCard, str, str]]:
    """Return the directions of translation: the other language's pairs, the source and the target language.

    languages: those beside the source language; none: all.
    """
    known, own = {each.language: each for each in card.languages}, card.source_language
    wanted = select_languages(languages, known) if languages else list(known)
    found = [(known[other], own, other) for other in wanted if direction != "into"]
    return found + [(known[other], other, own) for other in wanted if direction != "from"]


class PairDataset(Dataset[dict[str, torch.Tensor]]):
    """The pairs of a split (the items: at the top of this file), group after group.

    Attributes:
        groups: the directions of translation, such as "en-de", in the order of their pairs.
        sizes: the number of pairs of each group.
        source_lengths, target_lengths: the tokens of each item, int32 [pairs].
    """

    def __init__(self, prefix: str, vocabulary: Vocabulary, options: PairOptions = PairOptions()) -> None:
        """Open the split `prefix`, such as `data/catalogues/pairs/train`. Reads indices, but no tokens.

        Raises:
            UserError: for files that are missing or do not belong together, an unknown language, a
                language without a tag, or pairs that are too long.
        """
        self._prefix, self._options, self._vocab_size = prefix, options, vocabulary.size
        card, of_source, _ = load_pair_card(prefix)
        if of_source.tokenizer.vocab_size > vocabulary.size:
            raise UserError(
                f"pairs {prefix!r}: their vocabulary has {of_source.tokenizer.vocab_size} ids, the model's "
                f"{vocabulary.size}; raise model.vocab_size or leave it out"
            )
        files = PairFiles(Path(prefix))
        self._sides = (_Side(files.source), _Side(files.target))
        self._lay_out(card, vocabulary)
        self._check_lengths()

    def _lay_out(self, card: PairCard, vocabulary: Vocabulary) -> None:
        """Set the document, the direction, the group and the tag of each pair."""
        ends = np.cumsum([each.pairs for each in card.languages]).tolist()
        end_of = {each.language: end for each, end in zip(card.languages, ends, strict=True)}
        self.groups: list[str] = []
        self.sizes: list[int] = []
        self._tags: list[int | None] = []
        documents, reverses = [], []
        for each, left, right in directions(card, self._options.languages, self._options.direction):
            self.groups.append(f"{left}-{right}")
            self.sizes.append(each.pairs)
            self._tags.append(self._tag_of(right, vocabulary))
            documents.append(np.arange(end_of[each.language] - each.pairs, end_of[each.language]))
            reverses.append(np.full(each.pairs, right == card.source_language))
        self._document_N = np.concatenate(documents)
        self._is_reverse_N = np.concatenate(reverses)
        self._group_N = np.repeat(np.arange(len(self.groups)), self.sizes)

    def _tag_of(self, language: str, vocabulary: Vocabulary) -> int | None:
        if self._options.tag == "none":
            return None
        tags = vocabulary.special.languages
        if language not in tags:
            raise UserError(
                f"pairs {self._prefix!r}: the tokenizer reserves no <2{language}>; prepare the pairs with "
                "--tokenizer train, or choose no tag"
            )
        return tags[language]

    def _check_lengths(self) -> None:
        """Set the lengths of the items; cut or leave out what is too long, or raise a UserError."""
        most, what = self._options.max_length, self._options.too_long
        if most is not None and most < LEAST_LENGTH:
            raise UserError(
                f"data.sequence_length {most}: expected at least {LEAST_LENGTH} (a tag, a token, the end)"
            )
        lengths = self._lengths()
        if most is not None:
            is_long_N = np.maximum(*lengths) > most
            if what == "error" and is_long_N.any():
                raise UserError(
                    f"pairs {self._prefix!r}: {is_long_N.sum()} of {len(is_long_N)} have a side of more than "
                    f"data.sequence_length {most} tokens, the longest {max(map(np.max, lengths))}; raise it, "
                    "or set too_long to truncate or drop"
                )
            if what == "drop" and is_long_N.any():
                self._keep(~is_long_N)
                lengths = self._lengths()
            lengths = [np.minimum(length_N, most) for length_N in lengths]
        self.source_lengths, self.target_lengths = lengths

    def _keep(self, keep_N: np.ndarray) -> None:
        if not keep_N.any():
            raise UserError(f"pairs {self._prefix!r}: all are too long; raise data.sequence_length")
        self.sizes = np.bincount(self._group_N[keep_N], minlength=len(self.groups)).tolist()
        for name in ("_document_N", "_is_reverse_N", "_group_N"):
            setattr(self, name, getattr(self, name)[keep_N])

    def _lengths(self) -> list[np.ndarray]:
        """Return the lengths of the items' sources and targets, before any cut."""
        left_N, right_N = (side.lengths[self._document_N] for side in self._sides)
        source_N = np.where(self._is_reverse_N, right_N, left_N)
        target_N = np.where(self._is_reverse_N, left_N, right_N)
        tag = self._options.tag
        return [source_N + (tag == "source"), target_N + (tag == "target")]

    def __len__(self) -> int:
        return len(self._document_N)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return pair `index` (the item: at the top of this file).

        Raises:
            UserError: if the files have changed since the start.
            IndexError: if there is no such pair.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        document, group = int(self._document_N[index]), int(self._group_N[index])
        source, target = self._sides[::-1] if self._is_reverse_N[index] else self._sides
        tag = self._tags[group]
        return {
            "source": self._sequence(source, document, tag if self._options.tag == "source" else None),
            "target": self._sequence(target, document, tag if self._options.tag == "target" else None),
            "language": torch.tensor(group),
        }

    def _sequence(self, side: "_Side", document: int, tag: int | None) -> torch.Tensor:
        tokens = side.read(document, self._vocab_size)
        if tag is not None:
            tokens = np.concatenate(([tag], tokens))
        most = self._options.max_length
        if most is not None and len(tokens) > most:
            tokens = np.concatenate((tokens[: most - 1], tokens[-1:]))
        return torch.from_numpy(tokens)


class _Side:
    """Reads the texts of one side by their numbers.

    lengths: the tokens of each text, int32 [texts].
    """

    def __init__(self, files: DataFiles) -> None:
        self._file = open_bytes(files.bin)
        header, _ = check_arithmetic(files.idx, self._file.size)
        self.lengths = lengths_of(files)
        self._dtype = np.dtype(header.dtype)
        self._start_N = np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def read(self, number: int, vocab_size: int) -> np.ndarray:
        """Return the tokens of a text, int64 [its length]."""
        size = int(self.lengths[number]) * self._dtype.itemsize
        content = self._file.read(int(self._start_N[number]) * self._dtype.itemsize, size)
        tokens = np.frombuffer(content, self._dtype).astype(np.int64)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
            raise UserError(
                f"data: text {number} of {self._file.name} holds a token id outside of the vocabulary of "
                f"{vocab_size}; put the right file back, and go on with --resume"
            )
        return tokens


def verify_pairs(data: DataConfig, prefixes: Sequence[str], vocabulary: Vocabulary) -> dict[str, str]:
    """Verify the datasets of splits as `data.verify` says; return the SHA-256 of each .idx by its path.

    Every rank must call it, as `verify_sources`.

    Raises:
        UserError: on every rank, naming the file and what is wrong with it.
    """
    files = [PairFiles(Path(prefix)) for prefix in prefixes]
    paths = [str(side.prefix) for each in files for side in (each.source, each.target)]
    for prefix in prefixes:
        load_pair_card(prefix)
    return verify_sources(data, paths, vocabulary.size)


def epoch_order(
    groups: Sequence[str], sizes: Sequence[int], exponent: float, seed: int, epoch: int
) -> np.ndarray:
    """Return the pairs of an epoch in a random order, int64 [about sum(sizes)].

    A group of n_i pairs has the share n_i^a / sum_j n_j^a of each epoch for the exponent a (Conneau and
    Lample 2019, section 3.1; a = 1: by size). Each group is a stream of shuffled passes over its pairs, and
    an epoch continues where the one before it ended. So no pair is seen twice before all of its group are
    seen once.
    """
    size_G = np.array(sizes, dtype=np.float64)
    share_G = (size_G / size_G.max()) ** exponent * (size_G > 0)
    quota_G = share_G / share_G.sum() * size_G.sum()
    begin_G, end_G = (np.floor(quota_G * number + 0.5).astype(np.int64) for number in (epoch, epoch + 1))
    first_G = np.cumsum(sizes) - sizes
    parts = []
    for group, size, first, begin, end in zip(groups, sizes, first_G, begin_G, end_G, strict=True):
        while begin < end:
            number, place = divmod(int(begin), size)
            count = min(size - place, int(end - begin))
            order_N = _generator(seed, "pass", group, number).permutation(size)
            parts.append(first + order_N[place : place + count])
            begin += count
    order_N = np.concatenate(parts)
    _generator(seed, "order", "", epoch).shuffle(order_N)
    return order_N


def cut_batches(
    order_N: np.ndarray, width_N: np.ndarray, *, pairs: int, generator: np.random.Generator
) -> np.ndarray:
    """Return batches of `pairs` pairs of similar widths in a random order, one after the other.

    order_N: the pairs of an epoch; those at its end that fill no batch are left out. width_N: the longer side
    of every pair of the dataset.
    """
    count = len(order_N) // pairs
    order_N = order_N[: count * pairs]
    batches_BP = order_N[np.argsort(width_N[order_N], kind="stable")].reshape(count, pairs)
    return batches_BP[generator.permutation(count)].ravel()


class OrderedPairs(Dataset[dict[str, torch.Tensor]]):
    """The pairs epoch after epoch, in batches of `pairs` pairs: batch b is the samples from b * pairs on.

    A dataset for `megamoe.data.batches.BatchStream`. Its micro batches are parts of the planned batches if
    their size divides `pairs`.

    Args:
        num_samples: the length; the order has no end.
        exponent: of the shares of the groups (`epoch_order`).
    """

    def __init__(
        self, dataset: PairDataset, num_samples: int, *, seed: int, pairs: int, exponent: float = 1.0
    ) -> None:
        """Raise a UserError if there are fewer than `pairs` pairs."""
        width_N = np.maximum(dataset.source_lengths, dataset.target_lengths)

        @lru_cache(maxsize=1)
        def epoch(number: int) -> np.ndarray:
            order_N = epoch_order(dataset.groups, dataset.sizes, exponent, seed, number)
            generator = _generator(seed, "batches", "", number)
            return cut_batches(order_N, width_N, pairs=pairs, generator=generator)

        self.epoch = epoch  # returns the pairs of an epoch, int64: numbers of the dataset's items
        self._dataset, self._num_samples = dataset, num_samples
        self._starts = [0]  # the first sample of each epoch, and of the next
        if not len(epoch(0)):
            raise UserError(f"pairs: {len(dataset)} pairs make no batch of {pairs}; lower the batch size")

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample `index` (an item of `PairDataset`); raise IndexError past the end."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        while self._starts[-1] <= index:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        epoch = bisect.bisect_right(self._starts, index) - 1
        return self._dataset[int(self.epoch(epoch)[index - self._starts[epoch]])]


def evaluated_pairs(
    dataset: PairDataset, *, seed: int, pairs: int, num_samples: int
) -> Subset[dict[str, torch.Tensor]]:
    """Return the pairs of a set that is evaluated: every pair once, then every pair again, and so on.

    They come in batches of `pairs` pairs of similar widths. Unlike `PairBatches`, no rest of a pass is left
    out, so what is measured on as many samples as there are pairs does not depend on the seed.

    Raises:
        UserError: if there are no pairs.
    """
    if not len(dataset):
        raise UserError("pairs: found none to evaluate; choose other languages")
    passes = range(-(-num_samples // len(dataset)))
    orders = [epoch_order(dataset.groups, dataset.sizes, 1.0, seed, number) for number in passes]
    order_N = np.concatenate([np.zeros(0, np.int64), *orders])[:num_samples]
    width_N = np.maximum(dataset.source_lengths, dataset.target_lengths)[order_N]
    order_N = order_N[np.argsort(width_N, kind="stable")]
    batches = [order_N[first : first + pairs] for first in range(0, num_samples, pairs)]
    shuffled = _generator(seed, "evaluated", "", 0).permutation(len(batches))
    return Subset(dataset, [int(number) for place in shuffled for number in batches[place]])


def _generator(seed: int, purpose: str, name: str, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(f"pairs {purpose} {name}".encode()), number])
