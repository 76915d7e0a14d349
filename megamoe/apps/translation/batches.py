"""Which pairs form which batch: a plan that depends on the pairs' lengths, the seed and the epoch alone.

The plan knows no ranks. Batch 0, 1, 2 and so on go to the ranks in turn, so one rank sees in order what n
ranks see together, and a run goes on at exactly the batch at which it stopped.
"""

import bisect
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from megamoe.apps.translation.dataset import PairDataset
from megamoe.errors import UserError


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
) -> list[np.ndarray]:
    """Return batches of `pairs` pairs of similar widths, in a random order.

    order_N: the pairs of an epoch; those at its end that fill no batch are left out. width_N: the longer side
    of every pair of the dataset.
    """
    count = len(order_N) // pairs
    if not count:
        return []
    order_N = order_N[: count * pairs]
    batches = np.split(order_N[np.argsort(width_N[order_N], kind="stable")], count)
    return [batches[place] for place in generator.permutation(count)]


class PairBatches:
    """The batches of all epochs, by number. Batch 0 is the first of epoch 0.

    Args:
        pairs: of each batch; also an attribute.
        exponent: of the shares of the groups (`epoch_order`).
    """

    def __init__(self, dataset: PairDataset, *, seed: int, pairs: int, exponent: float = 1.0) -> None:
        """Raise a UserError if there are fewer than `pairs` pairs."""
        self._groups, self._sizes = list(dataset.groups), list(dataset.sizes)
        self._width_N = np.maximum(dataset.source_lengths, dataset.target_lengths)
        self._seed, self._exponent, self.pairs = seed, exponent, pairs
        if not self.epoch(0):
            raise UserError(f"pairs: {len(dataset)} pairs make no batch of {pairs}; lower the batch size")
        self._starts = [0]  # the number of the first batch of each epoch, and of the next
        self._known: dict[int, list[np.ndarray]] = {}

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Return the batches of an epoch, int64 [pairs of the batch] each: numbers of the dataset's items."""
        order_N = epoch_order(self._groups, self._sizes, self._exponent, self._seed, epoch)
        generator = _generator(self._seed, "batches", "", epoch)
        return cut_batches(order_N, self._width_N, pairs=self.pairs, generator=generator)

    def __getitem__(self, number: int) -> np.ndarray:
        """Return batch `number`, from 0 without end. The plans of the epochs before it are made once."""
        epoch, place = self.locate(number)
        return self._plan(epoch)[place]

    def locate(self, number: int) -> tuple[int, int]:
        """Return the epoch of a batch and its place in that epoch."""
        if number < 0:
            raise IndexError(f"batch {number}")
        while self._starts[-1] <= number:
            self._starts.append(self._starts[-1] + len(self._plan(len(self._starts) - 1)))
        epoch = bisect.bisect_right(self._starts, number) - 1
        return epoch, number - self._starts[epoch]

    def _plan(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._known:
            self._known = {epoch: self.epoch(epoch)}
        return self._known[epoch]


class OrderedPairs(Dataset[dict[str, torch.Tensor]]):
    """The pairs in the order of their batches: batch b is the samples b * pairs to (b + 1) * pairs - 1.

    A dataset for `megamoe.data.batches.BatchStream`. Its micro batches are parts of the planned batches if
    their size divides `batches.pairs`.

    Args:
        num_samples: the length; the order has no end.
    """

    def __init__(self, dataset: PairDataset, batches: PairBatches, num_samples: int) -> None:
        self._dataset, self._batches, self._num_samples = dataset, batches, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample `index` (an item of `PairDataset`); raise IndexError past the end."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        number, place = divmod(index, self._batches.pairs)
        return self._dataset[int(self._batches[number][place])]


def _generator(seed: int, purpose: str, name: str, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(f"pairs {purpose} {name}".encode()), number])
