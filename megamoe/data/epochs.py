"""The size of the training data: samples per epoch, and blend weights from the sources' sizes."""

from collections.abc import Sequence
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.card import DataFiles, load_card
from megamoe.data.index_file import read_header, tokens_before


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
