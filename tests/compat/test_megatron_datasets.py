"""Canaries of Megatron-Core's datasets."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megamoe.compat.megatron_datasets import (
    BarrierFreeBuilder,
    CachedBlend,
    CachedGPTDataset,
    RemoteIndexedDataset,
    documents_of_sample,
    token_files,
)
from tests.support.data.sources import build, config, make_data


@pytest.fixture(name="blend")
def _blend(tmp_path: Path) -> Any:
    """Return a blend of two sources, as a run reads it, without the surrounding checks."""
    paths = [make_data(tmp_path / name, [name * 50] * 4) for name in ("a", "b")]
    checked: Any = build(config(*paths), train=20).train
    return checked._dataset


def test_the_index_of_a_dataset(blend: Any) -> None:
    part = blend.datasets[0]
    assert isinstance(part, CachedGPTDataset)
    computed = GPTDataset._build_document_sample_shuffle_indices(part)
    assert [len(array) for array in computed] == [
        len(array) for array in (part.document_index, part.sample_index, part.shuffle_index)
    ]
    source = inspect.getsource(GPTDataset._build_document_sample_shuffle_indices)
    assert "allow_pickle=True" in source, "Megatron-Core's cache unpickles no more"


def test_the_index_of_a_blend(blend: Any) -> None:
    assert isinstance(blend, CachedBlend)
    for computed, used in zip(
        BlendedDataset._build_indices(blend), (blend.dataset_index, blend.dataset_sample_index), strict=True
    ):
        np.testing.assert_array_equal(computed, used)
    source = inspect.getsource(BlendedDataset._build_indices)
    assert "allow_pickle=True" in source, "Megatron-Core's cache unpickles no more"


def test_the_builder() -> None:
    for name in ("build_generic_dataset", "_build_megatron_datasets_parallel"):
        theirs, ours = getattr(BlendedMegatronDatasetBuilder, name), getattr(BarrierFreeBuilder, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
        assert "barrier()" in inspect.getsource(theirs), "Megatron-Core waits in no barrier any more"
    splits = inspect.signature(BlendedMegatronDatasetBuilder._build_megatron_dataset_splits)
    assert list(splits.parameters) == ["self", "dataset_path", "split", "sizes", "synchronize_ranks"]


def test_token_files(blend: Any) -> None:
    found = [Path(array.filename).suffix for part in blend.datasets for array in token_files(part)]
    assert found == [".bin", ".idx"] * 2


def test_documents_of_a_sample(blend: Any) -> None:
    part = blend.datasets[0]
    documents = documents_of_sample(part, 0)
    tokens = np.concatenate([part.dataset.get(int(document)) for document in documents])
    held = part[0]["tokens"].numpy()
    assert set(map(int, documents)) <= set(range(4))
    assert bytes(held.astype(np.uint8)) in bytes(tokens.astype(np.uint8))


def test_tokens_that_are_read_by_a_function(tmp_path: Path) -> None:
    prefix = make_data(tmp_path / "a", ["some text", "", "more"])
    content = Path(prefix + ".bin").read_bytes()
    theirs = IndexedDataset(prefix)
    Path(prefix + ".bin").unlink()
    ours = RemoteIndexedDataset(prefix, lambda at, size: content[at : at + size])
    assert len(ours) == len(theirs) == 2
    for number in range(2):
        np.testing.assert_array_equal(ours[number], theirs[number])
        np.testing.assert_array_equal(ours.get(number, 1, 2), theirs.get(number, 1, 2))
    assert [type(array) for array in token_files(SimpleNamespace(dataset=ours))] == [type(None), np.memmap]
