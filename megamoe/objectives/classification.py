"""Classification: an encoder reads a text and predicts its one label."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megamoe.config.schema import RunConfig
from megamoe.data.batches import Batch, Item
from megamoe.data.datasets import SPLIT_NAMES, VALID, Datasets, check_split
from megamoe.data.labels import ENDING, LabelledTexts, label_vocabulary, load_label_card, read_texts
from megamoe.data.pairs import filled, positions
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares, TrainingObjective
from megamoe.registry import register

ALL = "all"
ENDS = 2  # tokens that are added to a text, one on each side
NO_TEXT = -1  # the label of what stands after the last text of a set


@register("objective", "classification")
class Classification(TrainingObjective):
    """Predict the label of a text: cross entropy over `model.num_labels` labels of one pooled hidden state.

    `data.sources` names the training file of a classification task of tools/prepare_pairs.py, such as
    data/catalogues/labels/train.jsonl. If `data.split` has a share for validation, the file `valid.jsonl`
    beside it is this set. `data.validation` names further ones. The end-of-document token stands before a
    text, in the place of BERT's [CLS], and after it. The training texts come in a new order in each epoch. A
    validation set is taken in one random order, each text at most once.

    Source: Devlin et al. 2018 (BERT), section 4.1.
    """

    architectures = ("encoder",)
    reads = "labels"
    metrics = ("accuracy",)

    @dataclass
    class Config:
        """too_long: what becomes of a text of more than `data.sequence_length` tokens, the two ends included:
        an `error`, or `truncate`. languages: of the test sets `test.LANGUAGE.jsonl` beside the training file,
        those that become validation sets, by the language's name; `all`: every one.
        """

        too_long: Literal["error", "truncate"] = "error"
        languages: list[str] = field(default_factory=list)

    @classmethod
    def check(cls, options: Config, config: RunConfig) -> None:
        data = config.data
        if data.mock:
            raise ValueError("needs texts with labels; set data.mock to false, and data.sources to them")
        if data.document_aware:
            raise ValueError("a text is one document; set data.document_aware to false")
        if data.sampling_exponent is not None:
            raise ValueError("data.sampling_exponent is for several sources; leave it out")
        if data.sequence_length <= ENDS:
            raise ValueError(f"data.sequence_length {data.sequence_length}: expected at least {ENDS + 1}")
        for key, sources in (
            ("sources", data.sources),
            *((f"validation.{k}", v) for k, v in data.validation.items()),
        ):
            if len(sources) != 1:
                raise ValueError(
                    f"data.{key}: found {len(sources)} sources, expected one file of labelled texts"
                )
        if dict(zip(SPLIT_NAMES, check_split(data), strict=True))["test"] > 0:
            raise ValueError(
                "data.split: found a share for test, but there is a test set for each language; set it to 0, "
                "and name sets in train.objective.languages or data.validation"
            )

    @classmethod
    def data_vocabulary(cls, config: RunConfig) -> Vocabulary:
        return label_vocabulary(config.data, config.model.vocab_size)

    @classmethod
    def shares(cls, options: Config, config: RunConfig) -> TokenShares:
        """Of the mean length of the training texts."""
        vocabulary = cls.data_vocabulary(config)
        most, texts = config.data.sequence_length, _texts(config.data.sources[0].path, vocabulary)
        share = float(np.mean([min(len(tokens) + ENDS, most) for tokens in texts.tokens])) / most
        return TokenShares(encoder=share, predicted=0.0, counted=share)

    def __init__(self, options: Any, config: RunConfig, vocabulary: Vocabulary) -> None:
        super().__init__(options, config, vocabulary)
        assert vocabulary.eod is not None  # every tokenizer has one
        self._end = vocabulary.eod
        self._pad = self._end if vocabulary.special.pad is None else vocabulary.special.pad
        path = config.data.sources[0].path
        self._labels = load_label_card(path).labels
        if len(self._labels) != config.model.num_labels:
            raise UserError(
                f"model.num_labels: found {config.model.num_labels}, but the labels beside {path!r} are "
                f"{len(self._labels)}; set it to {len(self._labels)}"
            )
        self._train = self._open(path)
        self._validation = {name: self._open(each) for name, each in self._sets(Path(path)).items()}

    def samples_per_epoch(self) -> int:
        return len(self._train)

    def batch(self, items: list[Item], indices: list[int]) -> Batch:
        """Return the batch of texts, filled up to the longest; label and loss stand at the first token."""
        tokens_BS, lengths_B = filled(
            [item["tokens"] for item in items], self._pad, self.config.parallel.tensor
        )
        label_B = torch.stack([item["label"] for item in items])
        labels_BS, mask_BS = torch.zeros_like(tokens_BS), torch.zeros(tokens_BS.shape)
        labels_BS[:, 0] = label_B.clamp(min=0)
        mask_BS[:, 0] = (label_B != NO_TEXT).float()
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

    def evaluation_sums(self, batch: Batch, logits_BC: Tensor | None) -> dict[str, Tensor]:
        """Return the number of texts whose label has the largest logit."""
        assert logits_BC is not None
        is_right_B = logits_BC.argmax(1) == batch.labels_BS[:, 0]
        return {"accuracy": (is_right_B * batch.loss_mask_BS[:, 0]).sum()}

    def item(self, texts: LabelledTexts, place: int) -> Item:
        """Return `tokens`, int64 [S], and `label`, int64 [], of a text."""
        ids = texts.tokens[place][: self.config.data.sequence_length - ENDS]
        tokens_S = np.concatenate(([self._end], ids, [self._end]))
        return {"tokens": torch.from_numpy(tokens_S), "label": torch.tensor(texts.labels[place])}

    def no_item(self) -> Item:
        """Return what stands after the last text of a set; it has no loss."""
        return {"tokens": torch.tensor([self._end]), "label": torch.tensor(NO_TEXT)}

    def _sets(self, train: Path) -> dict[str, str]:
        """Return the file of each validation set, by name."""
        found: dict[str, str] = {}
        if dict(zip(SPLIT_NAMES, check_split(self.config.data), strict=True))[VALID] > 0:
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

    def _open(self, path: str) -> LabelledTexts:
        if load_label_card(path).labels != self._labels:
            raise UserError(f"data {path!r} has other labels than the training data; prepare them together")
        texts, most = _texts(path, self.vocabulary), self.config.data.sequence_length
        longest = max(len(tokens) for tokens in texts.tokens) + ENDS
        if longest > most and self.options.too_long == "error":
            raise UserError(
                f"data {path!r}: a text has {longest} tokens, its two ends included, more than "
                f"data.sequence_length {most}; raise it, or set train.objective.too_long to truncate"
            )
        return texts


def _texts(path: str, vocabulary: Vocabulary) -> LabelledTexts:
    assert vocabulary.tokenizer is not None
    return read_texts(path, vocabulary.tokenizer.name)


class _Ordered(Dataset[Item]):
    """The texts in the order of training or evaluation, which depends on seed, set and epoch alone."""

    def __init__(
        self, objective: Classification, texts: LabelledTexts, name: str, samples: int, repeats: bool
    ) -> None:
        self._objective, self._texts, self._samples, self._repeats = objective, texts, samples, repeats
        self._order = cache(lambda epoch: objective.draws(f"{name}/order/{epoch}").permutation(len(texts)))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Item:
        """Return sample `index`; raise IndexError past the end."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        epoch, place = divmod(index, len(self._texts))
        if epoch and not self._repeats:
            return self._objective.no_item()
        return self._objective.item(self._texts, int(self._order(epoch)[place]))
