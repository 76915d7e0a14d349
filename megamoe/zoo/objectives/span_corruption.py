"""Span corruption: an encoder reads text with gaps, a decoder writes what belongs into them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megamoe.config.schema import RunConfig
from megamoe.config.shapes import length_multiple
from megamoe.data.batches import Batch, Item, pair_batch
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares, TrainingObjective
from megamoe.registry import register


@register("objective", "span_corruption")
class SpanCorruption(TrainingObjective):
    """Replace spans of the source by sentinels, and write the spans behind their sentinels.

    Of a sequence a b c d e f the source may be `a <0> d <1> <end>` and the target `<0> b c <1> e f <end>`.
    The sentinels, one for each span, are those that the tokenizer reserves or, if these are too few, ids
    behind the data's vocabulary; <end>, with which the decoder also begins, is the end-of-document token. All
    samples have the same lengths.

    Source: Raffel et al. 2020 (T5), section 3.1.4.
    """

    architectures = ("encoder_decoder",)

    @dataclass
    class Config:
        """density: the share of tokens in spans. mean_span: the mean length of a span, in tokens."""

        density: float = 0.15
        mean_span: float = 3.0

    @classmethod
    def check(cls, options: Config, config: RunConfig) -> None:
        length = config.data.sequence_length
        if not 0 < options.density < 1:
            raise ValueError(f"density: found {options.density:g}, expected a share between 0 and 1")
        if options.mean_span < 1:
            raise ValueError(f"mean_span: found {options.mean_span:g}, expected at least 1 token")
        if config.data.document_aware:
            raise ValueError(
                "a sample is one sequence, whatever documents it holds; set data.document_aware to false"
            )
        if length < 2:
            raise ValueError(f"data.sequence_length {length} leaves nothing to hide; set at least 2")
        hidden, spans = _sizes(options, length)
        if hidden + spans + 1 > length:
            raise ValueError(
                f"density {options.density:g} and mean_span {options.mean_span:g} make targets of "
                f"{hidden + spans + 1} tokens of {length} (data.sequence_length); lower density or raise "
                "mean_span"
            )

    @classmethod
    def added_ids(cls, options: Config, config: RunConfig, vocabulary: Vocabulary) -> int:
        """Return the number of sentinels, if the tokenizer does not reserve as many."""
        needed = _sizes(options, config.data.sequence_length)[1]
        return 0 if len(vocabulary.special.sentinels) >= needed else needed

    @classmethod
    def shares(cls, options: Config, config: RunConfig) -> TokenShares:
        length = config.data.sequence_length
        hidden, spans = _sizes(options, length)
        target = (hidden + spans + 1) / length
        source = length - _left_out(hidden, spans) - hidden + spans + 1
        return TokenShares(source / length, target, target)

    def __init__(self, options: Any, config: RunConfig, vocabulary: Vocabulary) -> None:
        super().__init__(options, config, vocabulary)
        if vocabulary.eod is None:
            raise UserError(
                "train.objective span_corruption: the end-of-document token is unknown; give data.tokenizer"
            )
        self.end = vocabulary.eod
        first = vocabulary.of_data.size
        self.sentinels = range(first, vocabulary.size) if vocabulary.added else vocabulary.special.sentinels

    def sample(self, item: Item, place: str) -> Item:
        """Return `source` and `target`, int64; both end with the end-of-document token."""
        tokens_S, draws = item["tokens"].numpy(), self.draws(place)
        hidden, spans = _sizes(self.options, len(tokens_S))
        kept_lengths = _cut(len(tokens_S) - _left_out(hidden, spans) - hidden, spans, draws)
        hidden_lengths = _cut(hidden, spans, draws)
        source: list[Any] = []
        target: list[Any] = []
        first = 0
        for number, (kept, gap) in enumerate(zip(kept_lengths, hidden_lengths, strict=True)):
            sentinel = [self.sentinels[number]]
            source += [tokens_S[first : first + kept], sentinel]
            target += [sentinel, tokens_S[first + kept : first + kept + gap]]
            first += kept + gap
        source.append([self.end])  # as in T5's pipeline
        target.append([self.end])
        sides = (np.concatenate(side).astype(np.int64) for side in (source, target))
        return dict(zip(("source", "target"), map(torch.from_numpy, sides), strict=True))

    def batch(self, items: list[Item], indices: list[int]) -> Batch:
        """Return the batch of pairs; their lengths are filled up to a `length_multiple`."""
        longest, multiple = self.config.data.sequence_length, length_multiple(self.config)
        return pair_batch(items, indices, start=self.end, multiple=multiple, longest=longest)


def _sizes(options: Any, length: int) -> tuple[int, int]:
    """Return the number of hidden tokens and of spans."""
    hidden = min(max(round(length * options.density), 1), length - 1)
    spans = min(max(round(hidden / options.mean_span), 1), length - hidden)
    return hidden, spans


def _left_out(hidden: int, spans: int) -> int:
    """Return how many tokens at a sample's end are left out, so that the source is not longer than it."""
    return max(0, spans + 1 - hidden)


def _cut(total: int, parts: int, draws: np.random.Generator) -> list[int]:
    """Cut so many tokens into parts of at least one token, all ways with equal probability."""
    edges = 1 + np.sort(draws.choice(total - 1, parts - 1, replace=False))
    return np.diff(np.concatenate(([0], edges, [total]))).tolist()
