"""What the objectives have in common that read examples of a task and predict labels, numbers or spans."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megamoe.apps.finetune.label_files import (
    ENDING,
    REMEDY,
    Line,
    label_vocabulary,
    load_label_card,
    read_lines,
)
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import length_multiple
from megamoe.data.batches import Batch, Item, filled, positions
from megamoe.data.datasets import VALID, Datasets, check_split
from megamoe.data.tokenizers import Tokenizer, load_tokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares, TrainingObjective

ALL = "all"
ENDS = 2  # tokens that are added to a text, one on each side


@dataclass(frozen=True)
class Example:
    """A line as tokens, and what the model is to predict of it.

    tokens_S: int64, with its ends, at most `data.sequence_length`. length: the tokens before a cut. places_P:
    int64, the positions of the labels. labels_P: int64, or fp32 for numbers. spans: of an objective that
    predicts parts of a text, its characters' [start, end) of each token; (0, 0): a token of something else.
    words: of an objective that predicts words, the position of each one's label, 0 for a word without one.
    """

    tokens_S: np.ndarray
    length: int
    places_P: np.ndarray
    labels_P: np.ndarray
    spans: tuple[tuple[int, int], ...] = ()
    words: tuple[int, ...] = ()

    def item(self) -> Item:
        """Return the tensors `tokens`, `places` and `labels`."""
        return {
            "tokens": torch.from_numpy(self.tokens_S),
            "places": torch.from_numpy(self.places_P),
            "labels": torch.from_numpy(self.labels_P),
        }


@dataclass(frozen=True)
class Reading:
    """How lines become examples. end: the id before and after a text. labels: the names, in their order.

    most: `data.sequence_length`, the most tokens of an example.
    """

    tokenizer: Tokenizer
    end: int
    most: int
    labels: tuple[str, ...]


class Labelled(TrainingObjective, ABC):
    """Predicts what a file of JSON lines says of each example, with a head of `model.predicts`.

    `data.sources` names the training file. If `data.split` has a share for validation, the file `valid.jsonl`
    beside it is this set. `data.validation` names further ones. The training examples come in a new order in
    each epoch. A validation set is taken in one random order, each example at most once.

    A subclass sets outputs: those of the head; None: as many as the labels that `labels.json` names. Without
    named labels it needs none, and train.label_smoothing has no meaning.
    """

    architectures = ("encoder",)
    reads = "labels"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    outputs: ClassVar[int | None] = None

    @dataclass
    class Config:
        """too_long: what becomes of an example of more than `data.sequence_length` tokens, its ends included:
        an `error`, or `truncate`. languages: of the test sets `test.LANGUAGE.jsonl` beside the training file,
        those that become validation sets, by the language's name; `all`: every one.
        """

        too_long: Literal["error", "truncate"] = "error"
        languages: list[str] = field(default_factory=list)

    @classmethod
    @abstractmethod
    def verify(cls, line: Line) -> None:
        """Check a line without its labels' names and without a tokenizer.

        Raises:
            UserError: as `example`.
        """

    @classmethod
    @abstractmethod
    def example(cls, line: Line, reading: Reading) -> Example:
        """Return a line as an example.

        Raises:
            UserError: naming the line, if it is not what the objective reads.
        """

    @classmethod
    def examples(cls, lines: list[Line], reading: Reading) -> list[Example]:
        """Return all lines as examples."""
        return [cls.example(line, reading) for line in lines]

    @abstractmethod
    def prediction(self, example: Example, logits: Tensor) -> Any:
        """Return what the model says of an example, as plain data.

        logits: of this example, see `LabelHead`; of a head that has some of each token, with padding.
        """

    @classmethod
    def check(cls, options: Any, config: RunConfig) -> None:
        data = config.data
        least, smooths = ENDS + 1, bool(config.train.label_smoothing)
        for is_wrong, problem in (
            (data.mock, "needs texts with labels; set data.mock to false, and data.sources to them"),
            (data.order != "documents", "texts are shuffled one by one; leave data.order out"),
            (data.document_aware, "a text is one document; set data.document_aware to false"),
            (
                data.sampling_exponent is not None,
                "data.sampling_exponent is for several sources; leave it out",
            ),
            (data.sequence_length < least, f"data.sequence_length: expected at least {least}"),
            (smooths and cls.outputs is not None, "train.label_smoothing is for labels; leave it out"),
        ):
            if is_wrong:
                raise ValueError(problem)
        named = {f"validation.{name}": sources for name, sources in data.validation.items()}
        for key, sources in {"sources": data.sources, **named}.items():
            if len(sources) != 1:
                raise ValueError(f"data.{key}: found {len(sources)} sources, expected one file of texts")
        if check_split(data)[2] > 0:
            raise ValueError(
                "data.split: found a share for test, but there is a test set for each language; set it to 0, "
                "and name sets in train.objective.languages or data.validation"
            )

    @classmethod
    def data_vocabulary(cls, config: RunConfig) -> Vocabulary:
        return label_vocabulary(config.data, config.model.vocab_size)

    @classmethod
    def shares(cls, options: Any, config: RunConfig) -> TokenShares:
        """Return what is computed of a training text of mean length."""
        vocabulary, most = cls.data_vocabulary(config), config.data.sequence_length
        examples = _examples(cls, config.data.sources[0].path, vocabulary, most)
        share = float(np.mean([len(example.tokens_S) for example in examples])) / most
        return TokenShares(encoder=share, predicted=0.0, counted=share)

    def __init__(self, options: Any, config: RunConfig, vocabulary: Vocabulary) -> None:
        super().__init__(options, config, vocabulary)
        assert vocabulary.eod is not None  # every tokenizer has one
        self._end = vocabulary.eod
        path = config.data.sources[0].path
        self.labels = _labels(type(self), path)
        outputs = len(self.labels) if self.outputs is None else self.outputs
        if outputs != config.model.num_labels:
            raise UserError(
                f"model.num_labels: found {config.model.num_labels}, but the labels beside {path!r} are "
                f"{outputs}; set it to {outputs}"
            )
        self._train = self.open(path)
        self._validation = {name: self.open(each) for name, each in self._sets(Path(path)).items()}

    def samples_per_epoch(self) -> int:
        return len(self._train)

    def batch(self, items: list[Item], indices: list[int]) -> Batch:
        tokens = [item["tokens"] for item in items]
        tokens_BS, lengths_B = filled(tokens, self.vocabulary.pad, length_multiple(self.config))
        labels_BS = torch.zeros(tokens_BS.shape, dtype=items[0]["labels"].dtype)
        mask_BS = torch.zeros(tokens_BS.shape)
        for row, item in enumerate(items):
            labels_BS[row, item["places"]] = item["labels"]
            mask_BS[row, item["places"]] = 1.0
        return Batch(
            tokens_BS=tokens_BS,
            labels_BS=labels_BS,
            position_ids_BS=positions(lengths_B, tokens_BS.shape[1]),
            loss_mask_BS=mask_BS,
            document_start_BS=None,
            sample_index_B=torch.tensor(indices),
            lengths_B=lengths_B,
        )

    def datasets(self, train_samples: int, validation_samples: int) -> Datasets:
        train = _Ordered(self, self._train, "train", train_samples, repeats=True)
        if not validation_samples:
            return Datasets(train, {})
        sets = {
            name: _Ordered(self, texts, name, validation_samples, repeats=False)
            for name, texts in self._validation.items()
        }
        return Datasets(train, dict(sets))

    def no_item(self) -> Item:
        """Return what stands after the last example of a set; it has no loss."""
        nothing = torch.zeros(0, dtype=torch.int64)
        labels = torch.from_numpy(self._train[0].labels_P[:0])
        return {"tokens": torch.full((ENDS,), self._end), "places": nothing, "labels": labels}

    def open(self, path: str) -> list[Example]:
        """Return the examples of a file, in its order.

        Raises:
            UserError: naming the file, and the line if one is broken, or if one is too long.
        """
        if _labels(type(self), path) != self.labels:
            raise UserError(f"data {path!r} has other labels than the training data; prepare them together")
        most = self.config.data.sequence_length
        examples = _examples(type(self), path, self.vocabulary, most)
        longest = max(example.length for example in examples)
        if longest > most and self.options.too_long == "error":
            raise UserError(
                f"data {path!r}: a text has {longest} tokens, its two ends included, more than "
                f"data.sequence_length {most}; raise it, or set train.objective.too_long to truncate"
            )
        return examples

    def _sets(self, train: Path) -> dict[str, str]:
        """Return the file of each validation set, by name."""
        found: dict[str, str] = {}
        if check_split(self.config.data)[1] > 0:
            found[VALID] = str(train.with_name(VALID + ENDING))
        known = {
            path.name[len("test.") : -len(ENDING)]: path for path in train.parent.glob(f"test.*{ENDING}")
        }
        languages = self.options.languages
        for language in sorted(known) if languages == [ALL] else languages:
            if language not in known:
                raise UserError(
                    f"train.objective.languages: no test set of {language!r} beside {str(train)!r}; there is "
                    f"{', '.join(sorted(known)) or 'none'}"
                )
            found[language] = str(known[language])
        for name, sources in self.config.data.validation.items():
            if name in found:
                raise UserError(
                    f"data.validation: {name!r} is a set of data.split or train.objective.languages; "
                    "choose another name"
                )
            found[name] = sources[0].path
        return found


def right_share(batch: Batch, predicted_BS: Tensor) -> dict[str, Tensor]:
    """Return the sum `accuracy`: the number of labels with a loss that equal the predicted ones."""
    return {"accuracy": ((predicted_BS == batch.labels_BS) * batch.loss_mask_BS).sum()}


def text_of(line: Line, key: str, expected: str) -> str:
    """Return a text of a line's object.

    Raises:
        UserError: if it is missing or empty.
    """
    text = line.content.get(key) if isinstance(line.content, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{line.where}: expected {expected}")
    if not text.strip():
        raise UserError(f"{line.where}: the {key} is empty; remove the line")
    return text


def number_of(line: Line, label: object, labels: tuple[str, ...]) -> int:
    """Return the number of a label.

    Raises:
        UserError: if there is no such label.
    """
    if label not in labels:
        raise UserError(f"{line.where}: the label {str(label)[:60]!r} is not in labels.json; {REMEDY}")
    return labels.index(str(label))


def _labels(part: type[Labelled], path: str) -> tuple[str, ...]:
    return tuple(load_label_card(path).labels) if part.outputs is None else ()


def _examples(part: type[Labelled], path: str, vocabulary: Vocabulary, most: int) -> list[Example]:
    """Return the examples of a file; one that has not changed is read once."""
    assert vocabulary.tokenizer is not None and vocabulary.eod is not None
    labels = _labels(part, path)
    try:
        stamp = Path(path).stat()
    except OSError as error:
        raise UserError(f"data {path!r} cannot be read: {error.strerror}; {REMEDY}") from None
    changed = (stamp.st_mtime_ns, stamp.st_size)
    key: Any = part
    return _read(key, path, vocabulary.tokenizer.name, vocabulary.eod, most, labels, changed)


@lru_cache(maxsize=256)
def _read(
    part: Any,
    path: str,
    tokenizer: str,
    end: int,
    most: int,
    labels: tuple[str, ...],
    changed: tuple[int, int],
) -> list[Example]:
    reading = Reading(load_tokenizer(tokenizer), end, most, labels)
    return part.examples(read_lines(path), reading)


class _Ordered(Dataset[Item]):
    """Examples in the order of training or evaluation, which depends on seed, set and epoch alone."""

    def __init__(
        self, objective: Labelled, examples: list[Example], name: str, samples: int, repeats: bool
    ) -> None:
        self._objective, self._examples, self._samples, self._repeats = objective, examples, samples, repeats
        self._order = cache(lambda epoch: objective.draws(f"{name}/order/{epoch}").permutation(len(examples)))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Item:
        """Return sample `index`; raise IndexError past the end."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        epoch, place = divmod(index, len(self._examples))
        if epoch and not self._repeats:
            return self._objective.no_item()
        return self._examples[int(self._order(epoch)[place])].item()
