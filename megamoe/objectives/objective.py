"""The base class of training objectives."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from megamoe.config.schema import RunConfig
from megamoe.data.batches import Batch, Item, stacked
from megamoe.data.datasets import Datasets, build_datasets, samples_per_epoch
from megamoe.data.vocabulary import Vocabulary, resolve_vocabulary
from megamoe.errors import UserError
from megamoe.registry import get_part, naming_failures


@dataclass(frozen=True)
class TokenShares:
    """What an objective computes of a sample, as shares of `data.sequence_length`.

    encoder, decoder: the tokens of that stack. predicted: the positions with logits. counted: the tokens that
    the metrics report, such as `tokens` and `perf/tokens_per_s`.
    """

    encoder: float = 1.0
    decoder: float = 1.0
    predicted: float = 1.0
    counted: float = 1.0


class TrainingObjective:
    """Turns the data's samples into what the model reads and predicts (`train.objective`).

    A subclass is registered with `register("objective", name)` and has a nested dataclass `Config`. The loss
    is the mean cross entropy of `Batch.labels_BS` where `loss_mask_BS` is 1: the training step knows no more.
    Not to be confused with `megamoe.moe.objective.Objective`, an auxiliary loss of the MoE layers.

    Everything random in a sample depends on (seed, dataset, number of the sample), never on the rank. It is
    therefore the same at every layout and after a resume.

    architectures: those of `model.architecture` that can be trained with it. reads: the kind of data that
    `data.sources` must name: `text` of tools/prepare_data.py, or `pairs` or `labels` (texts with
    labels) of tools/prepare_pairs.py. One that reads labels needs `model.num_labels`. predicts: the value of
    `model.predicts` that it needs; None: it does not matter. metrics: the names of the sums of
    `evaluation_sums`. pads: whether a decoder's sequences may end in padding (`Batch.lengths_B`).
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[Literal["text", "pairs", "labels"]] = "text"
    predicts: ClassVar[str | None] = None
    metrics: ClassVar[tuple[str, ...]] = ()
    pads: ClassVar[bool] = False

    @dataclass
    class Config:
        """No options."""

    @classmethod
    def check(cls, options: Any, config: RunConfig) -> None:
        """Raise a ValueError, with a way out, if the options do not fit the rest of the configuration."""

    @classmethod
    def data_vocabulary(cls, config: RunConfig) -> Vocabulary:
        """Return the vocabulary of the data, without the objective's own ids.

        Raises:
            UserError: as `resolve_vocabulary`.
        """
        return resolve_vocabulary(config.data, config.model.vocab_size)

    @classmethod
    def added_ids(cls, options: Any, config: RunConfig, vocabulary: Vocabulary) -> int:
        """Return how many ids the objective needs after those of the data.

        vocabulary: the data's. None are needed where its tokenizer reserves them (`prepare_data --special`).
        """
        return 0

    @classmethod
    def shares(cls, options: Any, config: RunConfig) -> TokenShares:
        """Return what is computed of a sample."""
        return TokenShares()

    def __init__(self, options: Any, config: RunConfig, vocabulary: Vocabulary) -> None:
        """vocabulary: with the objective's own ids at its end.

        Raises:
            UserError: if the vocabulary lacks what the objective needs.
        """
        self.options = options
        self.config = config
        self.vocabulary = vocabulary

    def sample(self, item: Item, place: str) -> Item:
        """Return the sample that is made of an item of the data.

        place: the dataset and the number of the item, the key of all draws, see `draws`.
        """
        return item

    def batch(self, items: list[Item], indices: list[int]) -> Batch:
        """Return the batch of samples; indices: their numbers in the data.

        A sample may be several sequences, such as a bucket of sentences of similar lengths. Each of them then
        needs a number of its own in `Batch.sample_index_B`, on which its routers' draws depend.
        """
        return stacked(items, indices)

    def make_batch(self, items: list[Item], indices: list[int]) -> Batch:
        """Return `batch`; an error of a plugin's objective becomes a UserError that names it."""
        with naming_failures(type(self), f"train.objective: batch of {type(self).__name__}"):
            return self.batch(items, indices)

    def evaluation_sums(self, batch: Batch, logits: Tensor | None) -> dict[str, Tensor]:
        """Return further sums of an evaluated batch, a scalar for each name of `metrics`.

        Over all ranks and batches they are divided by the sum of the loss masks, and logged as
        val/<set>/<name>. logits: those of a head that predicts labels (`LanguageModel.label_logits`), fp32.
        """
        return {}

    def draws(self, place: str) -> np.random.Generator:
        """Return the random generator of one sample."""
        digest = hashlib.blake2b(f"{self.config.seed}/objective/{place}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))

    def samples_per_epoch(self) -> int:
        """Return the training samples of one pass over the data, which is not mock data."""
        return samples_per_epoch(self.config.data)

    def datasets(self, train_samples: int, validation_samples: int) -> Datasets:
        """Return the datasets with this objective's samples, of at least the given lengths.

        The default makes them of tokens in sequences of `data.sequence_length`. An objective that needs other
        data, such as pairs of sentences, builds its own here.

        Raises:
            UserError: as `build_datasets`.
        """
        found = build_datasets(
            self.config.data,
            self.vocabulary.of_data,
            seed=self.config.seed,
            train_samples=train_samples,
            validation_samples=validation_samples,
        )
        if type(self).sample is TrainingObjective.sample:
            return found
        return replace(
            found,
            train=_Samples(found.train, self, "train"),
            validation={name: _Samples(each, self, name) for name, each in found.validation.items()},
            test=None if found.test is None else _Samples(found.test, self, "test"),
        )


PER_TOKEN = ("tokens", "labels", "loss_mask")  # of a sample that is one sequence


class _Samples(Dataset[Item]):
    """The samples that an objective makes of a dataset."""

    def __init__(self, dataset: Dataset[Item], objective: TrainingObjective, name: str) -> None:
        self._dataset = dataset
        self._objective = objective
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        item, place = self._dataset[index], f"{self._name}/{index}"
        part = type(self._objective)
        with naming_failures(part, f"train.objective: sample of {part.__name__}"):
            made = self._objective.sample(item, place)
            lengths = {name: len(made[name]) for name in PER_TOKEN if name in made}
            if len({*lengths.values()}) > 1:
                raise ValueError(f"sample {place}: expected one length, found {lengths}")
        return made


def objective_class(config: RunConfig) -> type[TrainingObjective]:
    """Return the class of `train.objective`; raise UserError if it is no TrainingObjective."""
    name = config.train.objective.name
    part = get_part("objective", name)
    if not issubclass(part, TrainingObjective):
        raise UserError(f"train.objective: {name} is no TrainingObjective; its class must inherit from it")
    return part
