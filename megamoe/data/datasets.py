"""Training samples from indexed data, blended, split and shuffled by Megatron-Core's dataset builder."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from torch.utils.data import Dataset

from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.boundaries import indexed_documents
from megamoe.data.byte_files import is_stored
from megamoe.data.card import DataFiles, load_card
from megamoe.data.index_cache import VERSIONS, CachedConfig, build_cached
from megamoe.data.index_file import read_header, tokens_before
from megamoe.data.mapped_files import CheckedDataset
from megamoe.data.mock import MockDataset
from megamoe.data.ranks import raise_any_error, rank
from megamoe.data.sample_order import SampleOrder
from megamoe.data.verify import cache_folder, verify_sources
from megamoe.data.vocabulary import Vocabulary, resolve_vocabulary
from megamoe.errors import UserError
from megamoe.host_memory import available_bytes


def samples_per_epoch(data: DataConfig) -> int:
    """Return the samples of all sources' train splits, each counted once, whatever the blend's weights.

    As in Megatron-Core's GPTDataset, a source of n tokens has (n - 1) // sequence_length samples, for the
    last token of each sample is the first of the next. Mock data has no end and is not accepted.
    """
    assert not data.mock
    shares = parse_and_normalize_split(",".join(f"{share:.12f}" for share in data.split))
    _, train_end = convert_split_vector_to_split_matrix(shares)[0] or (0.0, 0.0)
    total = 0
    for source in data.sources:
        files = DataFiles(Path(source.path))
        documents = round(train_end * read_header(files.idx)[0].num_sequences)
        tokens = tokens_before(files.idx, documents)
        total += max(tokens - 1, 0) // data.sequence_length
    return total


def blend_weights(sources: Sequence[SourceConfig], exponent: float | None) -> list[float]:
    """Return each source's share of a blend, in their order. The shares sum to 1.

    The shares follow `weight`, or with an exponent a the sizes: n_i^a / sum_j n_j^a for n_i tokens (Conneau
    and Lample 2019, XLM, section 3.1, whose a is 0.5 and whose n counts sentences; Chi et al. 2022, X-MoE,
    section 4.1). a = 1: in proportion to the sizes; a = 0: evenly; between them small sources come more often
    than they would by size.
    """
    if exponent is None:
        parts = [source.weight for source in sources]
    else:
        sizes = [_tokens(source.path) for source in sources]
        # Divided by the largest first: a power of a large count could overflow a float.
        parts = [(size / max(sizes)) ** exponent for size in sizes]
    return [part / sum(parts) for part in parts]


def _tokens(path: str) -> int:
    """Return a dataset's tokens: its card's count, or without a card the sum of the index's lengths."""
    card = load_card(path)
    if card is not None:
        return card.tokens
    idx = DataFiles(Path(path)).idx
    return tokens_before(idx, read_header(idx)[0].num_sequences)


__all__ = ["Datasets", "Vocabulary", "build_datasets", "resolve_vocabulary"]

SPLIT_NAMES = ("train", "valid", "test")
VALID = "valid"
WHOLE_AS_VALIDATION = [0.0, 1.0, 0.0]
# Samples of a source beyond its share, at least: Megatron-Core's default.
MIN_SURPLUS = 0.005
MOST_EPOCHS = 100_000  # Megatron-Core counts them one by one


@dataclass(frozen=True)
class Datasets:
    """`train`, the validation sets by name, and `test`, the third share of `data.split`, if there is one.

    An item is a dict of `tokens`, `labels`, `position_ids` ([S] int64), `loss_mask` ([S] float32) and,
    with `data.document_aware`, `document_start` ([S] int32, where each token's document begins).
    """

    train: Dataset[dict[str, torch.Tensor]]
    validation: dict[str, Dataset[dict[str, torch.Tensor]]]
    test: Dataset[dict[str, torch.Tensor]] | None = None


def build_datasets(
    data: DataConfig, vocabulary: Vocabulary, *, seed: int, train_samples: int, validation_samples: int
) -> Datasets:
    """Build the training set (at least 1 sample) and, if `validation_samples` > 0, the validation sets.

    Each has at least the requested length. Small data is repeated: with `data.order: documents` the documents
    of all epochs are shuffled together, with `samples` each epoch by itself.

    `valid` is the second share of `data.split`; `data.validation` adds sets of whole sources by name.
    With torch.distributed initialised every rank must call it: rank 0 writes the index, the others wait.

    Raises:
        UserError: for data that is damaged (by `data.verify`), a split that is malformed or too small for one
            sample, a validation set named `valid` twice, document-aware data whose end-of-document token is
            unknown or another one, or a cache that cannot be written.
    """
    split = check_split(data)
    names = [VALID] if split[1] > 0 else []
    if names and VALID in data.validation:
        raise UserError(f"data.validation: {VALID!r} is the second share of data.split; choose another name")
    if data.document_aware and vocabulary.eod is None:
        raise UserError("data.document_aware true: the end-of-document token is unknown; give data.tokenizer")
    if data.mock:
        mock = partial(_mock, data, vocabulary, seed)
        names = [*names, *data.validation] if validation_samples > 0 else []
        mocked: dict[str, Any] = {name: mock(name, validation_samples) for name in names}
        last = mock("test", validation_samples) if split[2] * validation_samples else None
        return Datasets(mock("train", train_samples), mocked, last)
    further = data.validation if validation_samples > 0 else {}
    paths = [source.path for sources in (data.sources, *further.values()) for source in sources]
    identities = verify_sources(data, paths, vocabulary.size)
    indexed: set[str] = set()
    if data.document_aware and vocabulary.eod is not None:
        indexed = indexed_documents(data, identities, vocabulary.eod)
    sizes = [train_samples, *(validation_samples if share > 0 else 0 for share in split[1:])]
    train, valid, test = _build(data, data.sources, vocabulary, identities, indexed, split, sizes, seed)
    validation = {} if valid is None else {VALID: valid}
    sizes = [0, validation_samples, 0]
    for name, sources in further.items():
        built = _build(data, sources, vocabulary, identities, indexed, WHOLE_AS_VALIDATION, sizes, seed)
        validation[name] = built[1]
    return Datasets(train, validation, test)


def check_split(data: DataConfig) -> list[float]:
    """Return the shares of train, validation and test, which sum to 1.

    Raises:
        UserError: if `data.split` has no three shares, or none for training.
    """
    if len(data.split) != len(SPLIT_NAMES) or data.split[0] <= 0:
        raise UserError(
            f"data.split {data.split}: expected three shares, train's above 0, such as [0.98, 0.02, 0.0]"
        )
    return [share / sum(data.split) for share in data.split]


def _mock(data: DataConfig, vocabulary: Vocabulary, seed: int, name: str, num_samples: int) -> MockDataset:
    return MockDataset(
        name,
        num_samples,
        sequence_length=data.sequence_length,
        vocab_size=vocabulary.size,
        eod=vocabulary.eod if data.document_aware else None,
        seed=seed,
    )


def _build(
    data: DataConfig,
    sources: Sequence[SourceConfig],
    vocabulary: Vocabulary,
    identities: Mapping[str, str],
    indexed: Collection[str],
    split: list[float],
    sizes: list[int],
    seed: int,
) -> list[Any]:
    """Build a dataset for each split whose size is not 0, from one source or a blend by weight.

    identities: the SHA-256 of each source's .idx, by path. indexed: as `indexed_documents` returns it.
    """
    paths = [source.path for source in sources]
    weights = blend_weights(sources, data.sampling_exponent if sources is data.sources else None)
    config = CachedConfig(
        random_seed=seed,
        sequence_length=data.sequence_length,
        blend=(paths, weights if len(paths) > 1 else None),
        split=",".join(f"{share:.12f}" for share in split),
        path_to_cache="",  # Megatron-Core's own: none
        tokenizer=_TokenFacts(vocabulary.size, vocabulary.eod, tuple(identities[path] for path in paths)),
        # `CheckedDataset` works out what depends on documents; Megatron-Core would make a mask of S x S.
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        samples_by_source=_samples_by_source(weights, sizes) if len(paths) > 1 else None,
    )
    config.split_matrix = [
        part if size > 0 else None for part, size in zip(config.split_matrix, sizes, strict=True)
    ]
    for path in paths:
        _check_room(path, config)
    eod = vocabulary.eod if data.document_aware else None
    if data.order == "samples":
        named = [(path, identities[path], weight) for path, weight in zip(paths, weights, strict=True)]
        facts: dict[str, Any] = {"sequence_length": data.sequence_length, "vocab_size": vocabulary.size}
        facts |= {"eod": eod, "seed": seed, "indexed": indexed}
        splits = zip(SPLIT_NAMES, config.split_matrix, sizes, strict=True)
        return [share and SampleOrder(named, name, share, size, **facts) for name, share, size in splits]
    by_source = config.samples_by_source or [sizes]
    raise_any_error(_index_problem(paths, by_source, config) if rank() == 0 else None)
    is_own = not data.cache and is_stored(DataFiles(Path(paths[0])).bin)  # the folder may be on each machine
    built = build_cached(config, sizes, cache_folder(data, paths[0]), on_each_machine=is_own)
    return [None if each is None else CheckedDataset(each, vocabulary.size, eod, indexed) for each in built]


def _check_room(path: str, config: GPTDatasetConfig) -> None:
    """Check that each wanted split holds at least one sample."""
    for name, _, documents, of, tokens in _wanted_splits(path, config):
        if tokens <= config.sequence_length:
            raise UserError(
                f"data {path!r}: its {name} split has {tokens} tokens ({documents} of {of} "
                f"documents), one sample needs {config.sequence_length + 1}; change data.split, shorten "
                "data.sequence_length or add data"
            )


def _wanted_splits(path: str, config: GPTDatasetConfig) -> Iterator[tuple[str, int, int, int, int]]:
    """Return (name, index, its documents, all documents, its tokens); split as Megatron-Core does."""
    idx = DataFiles(Path(path)).idx
    of = read_header(idx)[0].num_sequences
    for place, (name, share) in enumerate(zip(SPLIT_NAMES, config.split_matrix, strict=True)):
        if share is not None:
            first, last = (round(bound * of) for bound in share)
            yield name, place, last - first, of, tokens_before(idx, last) - tokens_before(idx, first)


def _index_problem(paths: list[str], by_source: list[list[int]], config: GPTDatasetConfig) -> str:
    """Return why the index of this many samples, by source and split, cannot be built; "" if it can.

    Megatron-Core holds in memory the documents of every epoch (int64, twice) and, for every sample, two int32
    for its position and one for the order.
    """
    available = available_bytes()
    for path, sizes in zip(paths, by_source, strict=True):
        for name, place, documents, _, tokens in _wanted_splits(path, config):
            samples = sizes[place]
            epochs = -(-samples * config.sequence_length // tokens)
            needed = 16 * epochs * documents + 12 * samples
            asked = (
                f"data {path!r}: train.steps, the batch size or evaluation.batches ask for {samples:,} "
                f"samples of its {name} split"
            )
            if epochs > MOST_EPOCHS:
                return f"{asked}, {epochs:,} epochs; expected at most {MOST_EPOCHS:,}: lower them or add data"
            if available is not None and needed > available:
                return (
                    f"{asked}, whose index needs {needed >> 20:,} MiB of memory; {available >> 20:,} MiB are "
                    "available: lower them, or set data.order: samples, which needs no index"
                )
    return ""


@dataclass(frozen=True)
class _TokenFacts:
    """The attributes of a tokenizer that GPTDataset uses.

    `unique_identifiers` are part of the cached index's key.
    """

    vocab_size: int
    eod: int | None
    identities: tuple[str, ...]

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"data": list(self.identities), "versions": VERSIONS}


def _samples_by_source(weights: list[float], sizes: list[int]) -> list[list[int]]:
    """Return the samples to index of each source and split, so that rounding never exhausts the blend.

    weights: of the sources, which sum to 1; sizes: of the splits. The blend is as long as the sum of the
    rounded-up shares, at most one more per source, and gives each source its share of that to within one.
    No number depends on another split, or on another source's weight: the order of a source's samples
    depends on how many epochs its number is.
    """

    def samples(weight: float, size: int) -> int:
        usual = math.ceil(math.ceil(size * weight) * (1 + MIN_SURPLUS))
        return max(usual, math.ceil((size + len(weights)) * weight + 1)) if size > 0 else 0

    return [[samples(weight, size) for size in sizes] for weight in weights]
