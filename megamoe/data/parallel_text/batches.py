"""Which pairs form which batch: a plan that depends on the pairs' lengths, the seed and the epoch alone.

The plan knows no ranks. Batch 0, 1, 2 and so on go to the ranks in turn, so one rank sees in order what n
ranks see together, and a run goes on at exactly the batch at which it stopped.
"""

import bisect
import zlib
from collections.abc import Sequence

import numpy as np

from megamoe.data.parallel_text.dataset import PairDataset
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
    order_N: np.ndarray,
    width_N: np.ndarray,
    *,
    pairs: int | None,
    tokens: int | None,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """Return batches of pairs of similar widths, in a random order.

    order_N: the pairs of an epoch; width_N: the longer side of every pair of the dataset. A batch has `pairs`
    pairs, and the pairs at the end of `order_N` that fill none are left out. Or it has the most pairs whose
    number times the greatest width is at most `tokens`: no side, with its padding, has more.
    """
    if pairs is not None:
        order_N = order_N[: len(order_N) // pairs * pairs]
    order_N = order_N[np.argsort(width_N[order_N], kind="stable")]
    if pairs is not None:
        batches = np.split(order_N, len(order_N) // pairs) if len(order_N) else []
    else:
        assert tokens is not None
        batches = _cut_by_tokens(order_N, width_N[order_N], tokens)
    places = generator.permutation(len(batches))
    return [batches[place] for place in places]


def _cut_by_tokens(order_N: np.ndarray, width_N: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Cut pairs, sorted by width, into the longest batches of at most `tokens`, padding included."""
    batches = []
    start = 0
    while start < len(order_N):
        # Pairs times greatest width grows with the number of pairs: a binary search finds the most that fit.
        most = min(len(order_N) - start, tokens // int(width_N[start]))
        count = bisect.bisect_right(range(1, most + 1), tokens, key=lambda n: n * int(width_N[start + n - 1]))
        batches.append(order_N[start : start + count])
        start += count
    return batches


class PairBatches:
    """The batches of all epochs, by number. Batch 0 is the first of epoch 0.

    Args:
        exponent: of the shares of the groups (`epoch_order`).
        pairs: of each batch; or tokens: the most of a side of a batch, padding included.
    """

    def __init__(
        self,
        dataset: PairDataset,
        *,
        seed: int,
        exponent: float = 1.0,
        pairs: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Raise a UserError if a pair is longer than `tokens`, or if there are fewer than `pairs` pairs."""
        assert (pairs is None) != (tokens is None), "either pairs or tokens"
        self._groups, self._sizes = list(dataset.groups), list(dataset.sizes)
        self._width_N = np.maximum(dataset.source_lengths, dataset.target_lengths)
        self._seed, self._exponent, self._pairs, self._tokens = seed, exponent, pairs, tokens
        if tokens is not None and self._width_N.max() > tokens:
            raise UserError(
                f"pairs: the longest side has {self._width_N.max()} tokens, a batch at most {tokens}; raise "
                "the batch's tokens or lower max_length"
            )
        if pairs is not None and not self.epoch(0):
            raise UserError(f"pairs: {len(dataset)} pairs make no batch of {pairs}; lower the batch size")
        self._starts = [0]  # the number of the first batch of each epoch, and of the next
        self._known: dict[int, list[np.ndarray]] = {}

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Return the batches of an epoch, int64 [pairs of the batch] each: numbers of the dataset's items."""
        order_N = epoch_order(self._groups, self._sizes, self._exponent, self._seed, epoch)
        generator = _generator(self._seed, "batches", "", epoch)
        return cut_batches(
            order_N, self._width_N, pairs=self._pairs, tokens=self._tokens, generator=generator
        )

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


def _generator(seed: int, purpose: str, name: str, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(f"pairs {purpose} {name}".encode()), number])
