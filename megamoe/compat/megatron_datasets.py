"""Megatron-Core's datasets: indices that are made elsewhere, a build without barriers, and the open files.

Seen with: Megatron-Core 0.16.1 and 0.19.2, where an entry does not say otherwise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, _BinReader, _IndexReader, get_idx_path
from torch.utils.data import Dataset


class RemoteTokens(_BinReader):
    """Reads tokens by a function of the first byte and the number of bytes.

    Reason: Megatron-Core's own reader of S3 keeps one block in memory, without attempts, checksums or a disk.
    Without it: tokens must lie on a local disk.
    Canary: test_megatron_datasets.py::test_tokens_that_are_read_by_a_function
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read

    def read(self, dtype: Any, count: int, offset: int) -> Any:
        """Return `count` numbers from byte `offset` on."""
        return np.frombuffer(self._read(int(offset), int(count) * np.dtype(dtype).itemsize), dtype)


class RemoteIndexedDataset(IndexedDataset):
    """An indexed dataset with its .idx on a disk, whose tokens are read by a function.

    Reason: the class opens the .bin when it is made.
    Without it: as without `RemoteTokens`.
    Canary: test_megatron_datasets.py::test_tokens_that_are_read_by_a_function
    """

    def __init__(self, path_prefix: str, read: Callable[[int, int], bytes]) -> None:
        Dataset.__init__(self)
        self.path_prefix, self.multimodal, self.mmap = path_prefix, False, False
        self.bin_reader = RemoteTokens(read)
        self.index = _IndexReader(get_idx_path(path_prefix), False)


class CachedGPTDataset(GPTDataset):
    """A dataset of one source and split, with its indices from the `index_cache` of its configuration.

    That is an object with `data.index_cache.IndexCache.arrays`. Megatron-Core computes missing ones; it saves
    nothing itself if `path_to_cache` is empty. The class' name is a part of their key.

    Reason: Megatron-Core's cache of indices writes in place and unpickles what it finds.
    Without it: a killed run leaves a broken index behind, and a cache folder can run code.
    Canary: test_megatron_datasets.py::test_the_index_of_a_dataset
    """

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedDataset:
        """Return the tokens and their index; config.remote_reader: reads tokens that are not on a disk."""
        reader = config.remote_reader(dataset_path)
        if reader is None:
            return GPTDataset.build_low_level_dataset(dataset_path, config)
        return RemoteIndexedDataset(dataset_path, reader)

    def _build_document_sample_shuffle_indices(self) -> Any:
        return self.config.index_cache.arrays(
            f"{self.unique_description_hash}-GPTDataset-{self.index_split.name}",
            self.unique_description,
            ("document_index", "sample_index", "shuffle_index"),
            super()._build_document_sample_shuffle_indices,
        )


class CachedBlend(BlendedDataset):
    """A blend of several sources, with its indices as those of `CachedGPTDataset`.

    Reason: as of `CachedGPTDataset`.
    Without it: as without that.
    Canary: test_megatron_datasets.py::test_the_index_of_a_blend
    """

    def _build_indices(self) -> Any:
        return self.config.index_cache.arrays(
            f"{self.unique_description_hash}-BlendedDataset-{self.split.name}",
            self.unique_description,
            ("dataset_index", "dataset_sample_index"),
            super()._build_indices,
        )


class BarrierFreeBuilder(BlendedMegatronDatasetBuilder):
    """Builds on the calling rank, without barriers; blends are `CachedBlend`s.

    config.samples_by_source: the samples to index of each source and split of a blend.

    Reason: Megatron-Core builds on rank 0, and the other ranks wait in a barrier. It indexes the same surplus
    in all sources and splits.
    Without it: where rank 0 fails, the others hang in the barrier until its timeout. A small validation set
    would need a large surplus, so a training set would be indexed for more epochs, in another order.
    Canary: test_megatron_datasets.py::test_the_builder
    """

    @staticmethod
    def build_generic_dataset(cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        """Return an instance of the class."""
        return (CachedBlend if cls is BlendedDataset else cls)(*args)

    def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:
        datasets = [
            self._build_megatron_dataset_splits(prefix, split, sizes, False)
            for prefix, sizes in zip(prefixes, self.config.samples_by_source, strict=True)
        ]
        return [list(of_split) for of_split in zip(*datasets, strict=True)]


def token_files(dataset: GPTDataset) -> list[Any]:
    """Return the memory-mapped arrays of a GPTDataset's tokens and of their index.

    Reason: no public attribute leads to the open files.
    Without it: a data file cut short during a run ends it with SIGBUS instead of a line.
    Canary: test_megatron_datasets.py::test_token_files
    """
    indexed = dataset.dataset
    tokens = getattr(indexed.bin_reader, "_bin_buffer_mmap", None)  # None: they are not on a disk
    return [tokens, indexed.index.bin_buffer_mmap]


def documents_of_sample(dataset: GPTDataset, sample: int) -> Any:
    """Return the numbers of the documents that a sample is made of, int array.

    Reason: Megatron-Core gives a sample's tokens only.
    Seen with: Megatron-Core 0.16.1 (it returns two values) and 0.19.2 (three).
    Without it: the line about a broken token id cannot name the document.
    Canary: test_megatron_datasets.py::test_documents_of_a_sample
    """
    return dataset._query_document_sample_shuffle_indices(sample)[1]
