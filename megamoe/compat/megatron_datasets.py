"""Megatron-Core's datasets: indices that are made elsewhere, a build without barriers, and the open files."""

from typing import Any

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset


class IndexedGPTDataset(GPTDataset):
    """A GPTDataset whose `make_index` may be overridden.

    Reason: Megatron-Core's cache of indices writes in place and unpickles what it finds.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: a killed run leaves a broken index behind, and a cache folder can run code.
    Canary: test_megatron_datasets.py::test_the_index_of_a_dataset
    """

    def make_index(self) -> Any:
        """(document index, sample index, shuffle index), as arrays."""
        return self.computed_index()

    def computed_index(self) -> Any:
        """Compute the index by Megatron-Core, which saves nothing if `path_to_cache` is empty."""
        return super()._build_document_sample_shuffle_indices()

    def _build_document_sample_shuffle_indices(self) -> Any:
        return self.make_index()


class IndexedBlend(BlendedDataset):
    """A BlendedDataset whose `make_index` may be overridden.

    Reason: as of `IndexedGPTDataset`.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: as without that.
    Canary: test_megatron_datasets.py::test_the_index_of_a_blend
    """

    def make_index(self) -> Any:
        """(dataset index, dataset sample index), as arrays."""
        return self.computed_index()

    def computed_index(self) -> Any:
        """Compute the index by Megatron-Core, which saves nothing if `path_to_cache` is empty."""
        return super()._build_indices()

    def _build_indices(self) -> Any:
        return self.make_index()


class BarrierFreeBuilder(BlendedMegatronDatasetBuilder):
    """Builds on the calling rank, without barriers.

    Reason: Megatron-Core builds on rank 0, and the other ranks wait in a barrier.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: where rank 0 fails, the others hang in the barrier until its timeout.
    Canary: test_megatron_datasets.py::test_the_builder
    """

    @staticmethod
    def build_generic_dataset(cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        """Return an instance of the class."""
        return cls(*args)

    def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:
        datasets = [
            self._build_megatron_dataset_splits(prefix, split, sizes, False)
            for prefix, sizes in zip(prefixes, sizes_per_dataset, strict=True)
        ]
        return [list(of_split) for of_split in zip(*datasets, strict=True)]


def token_files(dataset: GPTDataset) -> list[Any]:
    """Return the memory-mapped arrays of a GPTDataset's tokens and of their index.

    Reason: no public attribute leads to the open files.
    Seen with: Megatron-Core 0.16.1 and 0.19.2.
    Without it: a data file cut short during a run ends it with SIGBUS instead of a line.
    Canary: test_megatron_datasets.py::test_token_files
    """
    indexed = dataset.dataset
    return [indexed.bin_reader._bin_buffer_mmap, indexed.index.bin_buffer_mmap]


def documents_of_sample(dataset: GPTDataset, sample: int) -> Any:
    """Return the numbers of the documents that a sample is made of, int array.

    Reason: Megatron-Core gives a sample's tokens only.
    Seen with: Megatron-Core 0.16.1 (it returns two values) and 0.19.2 (three).
    Without it: the line about a broken token id cannot name the document.
    Canary: test_megatron_datasets.py::test_documents_of_a_sample
    """
    return dataset._query_document_sample_shuffle_indices(sample)[1]
