"""Samples in an order that is computed, not stored: `data.order: samples`.

A source's tokens are cut into samples in the order of its file, and a keyed permutation says which sample
comes at which place of an epoch. So there is no index: start and memory do not depend on the number of
tokens, documents, samples or epochs, and the order does not depend on the run's length. The documents of a
sample are neighbours in the file.

The sources of a blend take turns as Megatron-Core's blends do, in periods of PERIOD samples.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets import helpers
from torch.utils.data import Dataset

from megamoe.data.batches import sample_items
from megamoe.data.boundaries import DocumentStarts
from megamoe.data.byte_files import REMEDY, open_bytes
from megamoe.data.card import DataFiles
from megamoe.data.index_file import read_header, tokens_before
from megamoe.errors import UserError

ROUNDS = 8
PERIOD = 1 << 20  # samples of a blend after which its sources come in the same turns again
BITS_64 = (1 << 64) - 1


class Permutation:
    """A random permutation of 0 ... size - 1, of which each entry is computed by itself.

    An entry is a place (row, column) in a table of at least `size` places, which a Feistel network permutes:
    each round adds to the one a function of the other. A result beyond the size is permuted again until it is
    below it. Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains": cycle walking and the
    generalized Feistel cipher.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._rows = math.isqrt(max(size - 1, 0)) + 1
        self._columns = -(-size // self._rows)
        digest = hashlib.shake_256(key.encode()).digest(8 * ROUNDS)
        self._keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]

    def __call__(self, place: int) -> int:
        """Return the entry at a place from 0 to size - 1."""
        while True:
            row, column = divmod(place, self._columns)
            for to_row, to_column in zip(self._keys[::2], self._keys[1::2], strict=True):
                row = (row + _mixed(column ^ to_row)) % self._rows
                column = (column + _mixed(row ^ to_column)) % self._columns
            place = row * self._columns + column
            if place < self.size:
                return place


def _mixed(number: int) -> int:
    """Return a hash of a 64-bit number: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & BITS_64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & BITS_64
    return number ^ (number >> 31)


class _Source:
    """The samples of one source and split: S + 1 tokens each, of which the last is the next one's first."""

    def __init__(self, path: str, share: tuple[float, float], length: int, key: str, indexed: bool) -> None:
        files = DataFiles(Path(path))
        header, _ = read_header(files.idx)
        first, last = (tokens_before(files.idx, round(bound * header.num_sequences)) for bound in share)
        self._first, self._length, self._dtype = first, length, np.dtype(header.dtype)
        self._per_epoch = (last - first - 1) // length
        self._file = open_bytes(files.bin)
        self.path = self._file.name
        self._starts = DocumentStarts(files.idx) if indexed else None
        self._order = lru_cache(4)(lambda epoch: Permutation(self._per_epoch, f"{key} {epoch}"))

    def sample(self, number: int) -> tuple[np.ndarray, list[int]]:
        """Return the tokens of sample `number`, int [S + 1], and where in it documents of the .idx end.

        Each epoch has another order.
        """
        epoch, place = divmod(number, self._per_epoch)
        start = self._first + self._order(epoch)(place) * self._length
        size, at = self._dtype.itemsize * (self._length + 1), self._dtype.itemsize * start
        ends = [] if self._starts is None else self._starts.between(start, start + self._length + 1)
        tokens_S = np.frombuffer(self._file.read(at, size), self._dtype)
        return tokens_S, [end - start - 1 for end in ends]


class SampleOrder(Dataset[dict[str, torch.Tensor]]):
    """The samples of one split, of one source or a blend; has as many as are asked for.

    Args:
        sources: path, SHA-256 of the .idx, and weight of each; the weights sum to 1.
        name: of the set; with the seed and the SHA-256 it selects the order.
        share: the first and the last of the source's documents, as shares of their number.
        eod: the token that ends a document, for items of `document_items`; None: no such items.
        indexed: the paths of sources whose .idx has further ends of documents.

    Raises:
        UserError: if a weight is too small for a sample in each period.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, str, float]],
        name: str,
        share: tuple[float, float],
        num_samples: int,
        *,
        sequence_length: int,
        vocab_size: int,
        eod: int | None,
        seed: int,
        indexed: Collection[str] = (),
    ) -> None:
        self._num_samples, self._vocab_size, self._eod = num_samples, vocab_size, eod
        self._sources = [
            _Source(path, share, sequence_length, f"{seed} {name} {identity}", path in indexed)
            for path, identity, _ in sources
        ]
        self._turns_P = np.zeros(PERIOD if len(sources) > 1 else 1, dtype=np.int16)
        self._numbers_P = np.zeros(len(self._turns_P), dtype=np.int64)
        self._per_period = np.ones(1, dtype=np.int64)
        if len(sources) > 1:
            weights = np.array([weight for _, _, weight in sources], dtype=np.float64)
            helpers.build_blending_indices(
                self._turns_P, self._numbers_P, weights, len(sources), PERIOD, False
            )
            self._per_period = np.bincount(self._turns_P, minlength=len(sources))
            if weights.min() * PERIOD < 1:
                path, _, weight = sources[int(np.argmin(weights))]
                raise UserError(
                    f"data {path!r}: its share of the blend is {weight:.2g}, less than one of {PERIOD:,} "
                    "samples; raise its weight or leave it out, or set data.order: documents"
                )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample `index`.

        Raises:
            UserError: if a file's size has changed since the start, or the sample's tokens are outside of the
                vocabulary.
            IndexError: if there is no such sample.
        """
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        period, place = divmod(index, len(self._turns_P))
        turn = int(self._turns_P[place])
        source = self._sources[turn]
        number = period * int(self._per_period[turn]) + int(self._numbers_P[place])
        found_S, ends = source.sample(number)
        tokens_S = found_S.astype(np.int64)
        if tokens_S.min() < 0 or tokens_S.max() >= self._vocab_size:
            wrong = tokens_S[(tokens_S < 0) | (tokens_S >= self._vocab_size)][0]
            raise UserError(
                f"data: sample {index} of {source.path} holds no token id: {wrong}, the vocabulary has "
                f"{self._vocab_size}; {REMEDY}"
            )
        return sample_items(torch.from_numpy(tokens_S), self._eod, ends)
