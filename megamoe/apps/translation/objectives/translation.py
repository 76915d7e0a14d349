"""Translation: an encoder reads a text, a decoder writes it in another language."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megamoe.apps.translation.card import PairCard, load_pair_card
from megamoe.apps.translation.dataset import (
    Direction,
    OrderedPairs,
    PairDataset,
    PairOptions,
    Tag,
    TooLong,
    directions,
    evaluated_pairs,
    verify_pairs,
)
from megamoe.apps.translation.pairs import select_languages
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import length_multiple
from megamoe.data.batches import Batch, Item, pair_batch
from megamoe.data.card import is_pairs
from megamoe.data.datasets import VALID, Datasets, check_split
from megamoe.data.stored import beside
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares, TrainingObjective
from megamoe.registry import register

TEST = "test"
MOST_PAIRS = 100_000


@register("objective", "translation")
class Translation(TrainingObjective):
    """Write the translation of a text: the cross entropy of the target's tokens, given the source's.

    `data.sources` names the training pairs of tools/prepare_pairs.py, such as data/catalogues/pairs/train. If
    `data.split` has a share for validation or test, the pairs `valid` or `test` beside them are these sets.
    `data.validation` names further ones. Pairs of similar lengths form a batch. The languages are sampled in
    proportion to (number of pairs)^a with a = `data.sampling_exponent`. `data.sequence_length` bounds both
    sides. The end-of-document token ends both sides, and the decoder begins with it.

    Source: Vaswani et al. 2017, section 5 (buckets, label smoothing); Johnson et al. 2017, section 3 (tags);
    Conneau and Lample 2019, section 3.1 (sampling).
    """

    architectures = ("encoder_decoder",)
    reads = "pairs"

    @dataclass
    class Config:
        """languages: those to learn beside the source language; none: all. direction: `from` the source
        language, `into` it, or `both`. tag: where the tag of the target's language stands, first in the
        `source` or the `target`, or `none`. too_long: what becomes of pairs with a side of more than
        `data.sequence_length` tokens, tag and end included: an `error`, `truncate`, or `drop`. bucket: the
        number of pairs of similar lengths that follow each other, a multiple of `train.micro_batch_size`.
        validate: directions such as en-de, each of which becomes a validation set of its own beside `valid`.
        """

        languages: list[str] = field(default_factory=list)
        direction: Direction = "from"
        tag: Tag = "source"
        too_long: TooLong = "error"
        bucket: int = 32
        validate: list[str] = field(default_factory=list)

    @classmethod
    def check(cls, options: Config, config: RunConfig) -> None:
        data, micro = config.data, config.train.micro_batch_size
        if not 1 <= options.bucket <= MOST_PAIRS or options.bucket % micro:
            raise ValueError(
                f"bucket: found {options.bucket}, expected a multiple of train.micro_batch_size {micro}, at "
                f"most {MOST_PAIRS:,}; such as {micro * max(1, round(options.bucket / micro))}"
            )
        for is_wrong, problem in (
            (data.mock, "needs pairs of texts; set data.mock to false, and data.sources to pairs"),
            (data.order != "documents", "pairs are shuffled in buckets; leave data.order out"),
            (data.document_aware, "a pair is one document; set data.document_aware to false"),
        ):
            if is_wrong:
                raise ValueError(problem)
        named = {f"validation.{name}": sources for name, sources in data.validation.items()}
        for key, sources in {"sources": data.sources, **named}.items():
            if len(sources) != 1:
                raise ValueError(
                    f"data.{key}: found {len(sources)}, expected one; prepare languages together"
                )
        # With further sets it is ignored: tools/evaluate.py --data replaces the data of a saved run.
        if options.validate and not data.validation and check_split(data)[1] <= 0:
            raise ValueError(
                f"validate: found {', '.join(options.validate[:3])}, but data.split {data.split} has no "
                "share for valid, of which these are parts; give it one, or set validate to []"
            )

    @classmethod
    def shares(cls, options: Config, config: RunConfig) -> TokenShares:
        """Return what is computed of a pair of mean lengths, by the card and before any cut."""
        prefix, most = config.data.sources[0].path, config.data.sequence_length
        sizes, lengths = _groups(options, load_pair_card(prefix)[0])
        share_G = sizes ** (1.0 if config.data.sampling_exponent is None else config.data.sampling_exponent)
        means = np.minimum(share_G @ lengths / share_G.sum(), most) / most
        return TokenShares(float(means[0]), float(means[1]), float(means[1]), float(means.sum()))

    def __init__(self, options: Any, config: RunConfig, vocabulary: Vocabulary) -> None:
        super().__init__(options, config, vocabulary)
        if vocabulary.eod is None:
            raise UserError("train.objective translation: the data has no end-of-document token")
        self._end = vocabulary.eod
        data = config.data
        self._prefix = data.sources[0].path
        try:
            select_languages(options.languages, self._languages())
        except UserError as error:
            raise UserError(f"train.objective.languages: {error}") from None
        self._pairs = self._open(self._prefix, options.languages)
        self._checked: list[str] = [self._prefix]
        self._validation: dict[str, PairDataset] = {}
        self._test: PairDataset | None = None
        _, valid, test = check_split(data)
        if valid > 0:
            self._open_valid(self._beside(VALID))
        if test > 0:
            self._test = self._open_part(self._beside(TEST))
        for name, sources in data.validation.items():
            if name in self._validation:
                raise UserError(f"data.validation: {name!r} is a set of data.split; choose another name")
            self._validation[name] = self._open_part(sources[0].path)

    def samples_per_epoch(self) -> int:
        return len(self._ordered(1, 1.0).epoch(0))

    def batch(self, items: list[Item], indices: list[int]) -> Batch:
        """Return the batch of pairs; their lengths are filled up to a `length_multiple`."""
        multiple = length_multiple(self.config)
        return pair_batch(items, indices, start=self._end, pad=self.vocabulary.pad, multiple=multiple)

    def datasets(self, train_samples: int, validation_samples: int) -> Datasets:
        verify_pairs(self.config.data, self._checked, self.vocabulary.of_data)
        exponent = self.config.data.sampling_exponent
        train = self._ordered(train_samples, 1.0 if exponent is None else exponent)
        if not validation_samples:
            return Datasets(train, {})
        validation = {
            name: self._evaluated(pairs, validation_samples) for name, pairs in self._validation.items()
        }
        test = None if self._test is None else self._evaluated(self._test, validation_samples)
        return Datasets(train, validation, test)

    def _evaluated(self, pairs: PairDataset, samples: int) -> Dataset[Item]:
        """Return samples of a set; where buckets do not divide them, micro batches have similar lengths."""
        fits = samples % self.options.bucket == 0
        size = self.options.bucket if fits else self.config.train.micro_batch_size
        return evaluated_pairs(pairs, seed=self.config.seed, pairs=size, num_samples=samples)

    def _ordered(self, samples: int, exponent: float) -> OrderedPairs:
        seed, size = self.config.seed, self.options.bucket
        return OrderedPairs(self._pairs, samples, seed=seed, exponent=exponent, pairs=size)

    def _languages(self) -> list[str]:
        """Return the languages of the training pairs."""
        return [each.language for each in load_pair_card(self._prefix)[0].languages]

    def _beside(self, split: str) -> str:
        """Return the prefix of another split of the training pairs' folder."""
        prefix = beside(self._prefix, split, self.config.data)
        if not is_pairs(prefix):
            raise UserError(
                f"data.split: has a share for {split}, but there are no pairs {prefix!r} beside "
                f"{self._prefix!r}; set that share to 0"
            )
        return prefix

    def _open(self, prefix: str, languages: list[str], direction: Direction | None = None) -> PairDataset:
        options = PairOptions(
            languages=tuple(languages),
            direction=direction or self.options.direction,
            tag=self.options.tag,
            max_length=self.config.data.sequence_length,
            too_long=self.options.too_long,
        )
        return PairDataset(prefix, self.vocabulary, options)

    def _open_part(self, prefix: str) -> PairDataset:
        """Open a set to evaluate on: the languages that are trained, as far as it has them."""
        self._checked.append(prefix)
        known = [each.language for each in load_pair_card(prefix)[0].languages if each.pairs]
        wanted = select_languages(self.options.languages, self._languages())
        found = [language for language in wanted if language in known]
        if wanted and not found:
            raise UserError(
                f"pairs {prefix!r}: none of the languages {', '.join(wanted)} of train.objective.languages"
            )
        return self._open(prefix, found)

    def _open_valid(self, prefix: str) -> None:
        """Open the validation set, and one for each direction of `validate`."""
        found = self._validation[VALID] = self._open_part(prefix)
        for wanted in self.options.validate:
            if wanted not in found.groups:
                raise UserError(
                    f"train.objective.validate: {wanted!r} is not in {prefix!r}; there is "
                    f"{', '.join(found.groups[:12])}{' and others' if len(found.groups) > 12 else ''}"
                )
            left, right = wanted.split("-")
            is_from = left == load_pair_card(prefix)[0].source_language
            language = right if is_from else left
            self._validation[wanted] = self._open(prefix, [language], "from" if is_from else "into")


def _groups(options: Any, card: PairCard) -> tuple[np.ndarray, np.ndarray]:
    """Return each direction's pairs, float64 [G], and mean source and target tokens, float64 [G, 2]."""
    tag_2 = [options.tag == "source", options.tag == "target"]
    sizes, lengths = [], []
    for each, source, _ in directions(card, options.languages, options.direction):
        if each.pairs:
            sides = [each.source_tokens / each.pairs, each.target_tokens / each.pairs]
            sizes.append(float(each.pairs))
            lengths.append(np.add(sides if source == card.source_language else sides[::-1], tag_2))
    return np.array(sizes), np.stack(lengths)
