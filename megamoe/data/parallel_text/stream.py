"""Hands the planned batches of pairs to the ranks.

Two ways, with the same batches:

- `OrderedPairs` puts the pairs of batches of a fixed number of pairs in a row, as a dataset for
  `megamoe.data.batches.BatchStream`;
- `PairStream` gives a rank its batches of any size, as they come from a token budget.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Dataset

from megamoe.data.batches import collate, warn
from megamoe.data.loader import Loader
from megamoe.data.parallel_text.batches import PairBatches
from megamoe.data.parallel_text.dataset import PairDataset
from megamoe.errors import UserError

Item = dict[str, torch.Tensor]
Batch = TypeVar("Batch")


class OrderedPairs(Dataset[Item]):
    """The pairs in the order of training: samples b * pairs to (b + 1) * pairs - 1 are batch b.

    With `pairs` the micro batch size, the micro batches of a `BatchStream` are the planned batches.

    Args:
        pairs: of each batch of `batches`.
        num_samples: the length; the order has no end.
    """

    def __init__(self, dataset: PairDataset, batches: PairBatches, pairs: int, num_samples: int) -> None:
        self._dataset, self._batches, self._pairs = dataset, batches, pairs
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Item:
        """Return sample `index` (an item of `PairDataset`); raise IndexError past the end."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        number, place = divmod(index, self._pairs)
        return self._dataset[int(self._batches[number][place])]


class PairStream(Generic[Batch]):
    """An iterator, without end, over the batches of one rank: start + data_rank, then every data_size-th.

    Usable as a context manager. Loader processes are forked when the stream is made.

    Args:
        start: the first batch of the stream, over all ranks.
        make_batch: makes a batch of items and their numbers in the dataset.
        workers: loader processes; 0: items are read in this process.
        report: called with a line when a loader process has died and was replaced.
    """

    def __init__(
        self,
        dataset: PairDataset,
        batches: PairBatches,
        *,
        start: int,
        data_rank: int,
        data_size: int,
        make_batch: Callable[[list[Item], list[int]], Batch],
        workers: int = 0,
        report: Callable[[str], None] = warn,
    ) -> None:
        indices = _Numbers(batches, start + data_rank, data_size)
        self._loader: Loader[Any] = Loader(
            _Readable(dataset),
            indices.from_batch,
            partial(collate, make_batch),
            workers=workers,
            report=report,
        )

    def __iter__(self) -> "PairStream[Batch]":
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            UserError: if a pair cannot be read, on the ranks that need it.
            RuntimeError: if loader processes die again and again, or hang.
            StopIteration: if the stream is closed.
        """
        batch = next(self._loader)
        if isinstance(batch, str):
            raise UserError(batch)
        result: Batch = batch
        return result

    def close(self) -> None:
        """End the loader processes. May be called twice."""
        self._loader.close()

    def __enter__(self) -> "PairStream[Batch]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Numbers:
    """The items of a rank's batches, from a batch on; without end."""

    def __init__(self, batches: PairBatches, first: int, stride: int) -> None:
        self._batches, self._first, self._stride = batches, first, stride

    def from_batch(self, number: int) -> "_Numbers":
        return _Numbers(self._batches, self._first + number * self._stride, self._stride)

    def __iter__(self) -> Iterator[list[int]]:
        number = self._first
        while True:
            yield self._batches[number].tolist()
            number += self._stride


class _Readable(Dataset[tuple[int, Item | str]]):
    """Items with their numbers; instead of an item that cannot be read, the error's message."""

    def __init__(self, dataset: PairDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Item | str]:
        try:
            return index, self._dataset[index]
        except UserError as error:
            return index, str(error)
