"""Small sources of data for the tests of this folder."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from torch.utils.data import Dataset

from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.batches import Batch, BatchStream
from megamoe.data.card import DataCard
from megamoe.data.datasets import Datasets, build_datasets, resolve_vocabulary

EOD = 256
ONLY_TRAIN = [1.0, 0.0, 0.0]


def make_data(prefix: Path, texts: list[str], tokenizer: str = "bytes") -> str:
    lines = prefix.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(Preparation(str(prefix), [str(lines)], tokenizer=tokenizer, overwrite=True, progress=False))
    return str(prefix)


def prepared(output: Path, *inputs: Path | str, **options: Any) -> DataCard:
    """Prepare inputs by bytes, unless the options say otherwise; return the card."""
    return prepare(Preparation(str(output), [str(path) for path in inputs], progress=False, **options))


def documents_of(output: Path) -> list[str]:
    """Each document of bytes without its end; the end is checked."""
    indexed = IndexedDataset(str(output))
    assert indexed.document_indices.tolist() == list(range(len(indexed) + 1))
    found = [indexed[number] for number in range(len(indexed))]
    assert all(tokens[-1] == EOD and EOD not in tokens[:-1] for tokens in found)
    return [bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in found]


def config(*paths: str, weights: list[float] | None = None, **options: object) -> DataConfig:
    sources = [SourceConfig(path, weight) for path, weight in zip(paths, weights or [1.0] * 9, strict=False)]
    return DataConfig(sources=sources, **({"sequence_length": 8, "split": ONLY_TRAIN} | options))  # type: ignore[arg-type]


def build(data: DataConfig, train: int = 10, validation: int = 0, seed: int = 1) -> Datasets:
    vocabulary = resolve_vocabulary(data, None)
    return build_datasets(data, vocabulary, seed=seed, train_samples=train, validation_samples=validation)


def stream(
    dataset: Dataset, size: int, start: int = 0, rank: int = 0, ranks: int = 1, **options: Any
) -> BatchStream:
    """The micro batches that a rank gets, of `size` samples; by default they are read in this process."""
    return BatchStream(
        dataset,
        start_sample=start,
        micro_batch_size=size,
        data_rank=rank,
        data_size=ranks,
        **({"workers": 0} | options),
    )


def take(batches: BatchStream, number: int) -> list[Batch]:
    with batches:
        return [next(batches) for _ in range(number)]


def letters(dataset: Dataset, number: int) -> Counter:
    """Return the letters of the first samples: each test source consists of one letter."""
    return Counter(chr(int(dataset[index]["tokens"][0])) for index in range(number))


def make_bare_data(prefix: Path) -> str:
    """Make data like Megatron-LM's preprocess_data.py, without a card."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for start in (0, 100):
        builder.add_document(np.arange(start, start + 30), [30])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
