"""Detecting memory-mapped data that changes while it is read, before the kernel kills the process.

A read past the end of a mapped file that was truncated raises SIGBUS. So the sizes of a sample's files are
checked before each sample, which takes a microsecond each. Replacing or deleting a mapped file has no effect:
the map keeps the old file. Writing into a mapped file has an effect, so a token id outside of the vocabulary,
or an index that points out of the file, is reported as well.
"""

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megamoe.compat.megatron_datasets import documents_of_sample, token_files
from megamoe.data.batches import document_items
from megamoe.data.byte_files import REMEDY
from megamoe.errors import UserError


@dataclass(frozen=True)
class _Mapped:
    """An open map of a file, and the size that the file had."""

    name: str
    map: mmap.mmap
    size: int

    @classmethod
    def of(cls, array: Any) -> "list[_Mapped]":
        """Return the map of a numpy.memmap; nothing for an array in memory."""
        found = getattr(array, "base", None)
        return [cls(str(array.filename), found, found.size())] if isinstance(found, mmap.mmap) else []

    def check(self) -> None:
        try:
            size = self.map.size()  # the file's present size, by fstat
        except OSError as error:
            raise UserError(f"data: {self.name} can no longer be read: {error.strerror}; {REMEDY}") from None
        if size != self.size:
            raise UserError(f"data: {self.name} had {self.size} bytes and now has {size}; {REMEDY}")


class CheckedDataset(Dataset[dict[str, torch.Tensor]]):
    """A GPTDataset, or a blend of several, that checks a sample's files before it reads the sample.

    Args:
        vocab_size: every token id must be smaller.
        eod: the token that ends a document, where samples have the items of `document_items`; None: they do
            not.
        indexed: the paths of datasets in which each sequence of the .idx ends a document as well: they are
            shuffled one by one.
    """

    def __init__(
        self, dataset: Any, vocab_size: int, eod: int | None = None, indexed: Collection[str] = ()
    ) -> None:
        self._dataset, self._vocab_size, self._eod, self._indexed = dataset, vocab_size, eod, indexed
        self._blended = hasattr(dataset, "datasets")
        self._own = _of(dataset, "dataset_index", "dataset_sample_index") if self._blended else []
        self._parts = [_files(part) for part in (dataset.datasets if self._blended else [dataset])]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample `index`.

        Raises:
            UserError: if a file's size has changed since the start, or the sample's tokens are outside of the
                vocabulary.
            IndexError: if there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        for file in self._own:
            file.check()
        part, inner = 0, index
        if self._blended:
            part = int(self._dataset.dataset_index[index])
            inner = int(self._dataset.dataset_sample_index[index])
        if not 0 <= part < len(self._parts):
            raise UserError(f"data: {self._own[0].name} was changed at sample {index}; {REMEDY}")
        for file in self._parts[part]:
            file.check()
        dataset = self._dataset.datasets[part] if self._blended else self._dataset
        try:
            sample: dict[str, torch.Tensor] = self._dataset[index]
        except (IndexError, ValueError) as error:
            raise self._changed(dataset, index, f"cannot be read ({error})") from error
        # The labels are the tokens after the first, and one more.
        low, high = torch.aminmax(sample["labels"])
        first = int(sample["tokens"][0])
        if min(int(low), first) < 0 or max(int(high), first) >= self._vocab_size:
            raise self._changed(dataset, index, self._outside(dataset, inner))
        if self._eod is None:
            return sample
        ends = _ends(dataset, inner) if dataset.dataset_path in self._indexed else ()
        return sample | document_items(sample["tokens"], self._eod, ends)

    def _changed(self, dataset: Any, index: int, what: str) -> UserError:
        return UserError(f"data: sample {index} of {dataset.dataset_path}.bin {what}; {REMEDY}")

    def _outside(self, dataset: Any, inner: int) -> str:
        """Return which token is outside of the vocabulary; `inner`: the sample's number in its dataset."""
        for document in documents_of_sample(dataset, inner):
            tokens_N = dataset.dataset.get(int(document))
            wrong_N = np.flatnonzero((tokens_N < 0) | (tokens_N >= self._vocab_size))
            if wrong_N.size:
                token = f"token {wrong_N[0]} of document {document} is {tokens_N[wrong_N[0]]}"
                return f"holds no token id: {token}, the vocabulary has {self._vocab_size}"
        return "has changed"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _ends(dataset: Any, inner: int) -> np.ndarray:
    """Return the positions in a GPTDataset's sample at which its sequences end; -1 if the first is empty."""
    row = dataset.shuffle_index[inner]
    (first, offset), (last, _) = dataset.sample_index[row], dataset.sample_index[row + 1]
    lengths = dataset.dataset.sequence_lengths[dataset.document_index[first:last]]
    return np.asarray(np.cumsum(lengths) - offset - 1)


def _files(dataset: Any) -> list[_Mapped]:
    """Return the files of the tokens, their index, and the cached order of the samples."""
    tokens = [file for array in token_files(dataset) for file in _Mapped.of(array)]
    return tokens + _of(dataset, "document_index", "sample_index", "shuffle_index")


def _of(dataset: Any, *names: str) -> list[_Mapped]:
    return [file for name in names for file in _Mapped.of(getattr(dataset, name))]
