"""Classification and regression: an encoder reads a text, or two, and predicts a label or a number."""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe.apps.finetune.label_files import Line
from megamoe.apps.finetune.objectives.labelled import (
    ENDS,
    Example,
    Labelled,
    Reading,
    number_of,
    right_share,
    text_of,
)
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.registry import register

SECOND = "second"  # the key of a pair's second text
LARGEST = float(np.finfo(np.float32).max)  # label of a regression


class TextObjective(Labelled):
    """Reads `text` and, of a pair, `second`. The end-of-document token stands before a text, in place of
    BERT's [CLS], and after it. It stands twice between the texts of a pair (Liu et al. 2019, RoBERTa). Of a
    pair that is too long, the longer text is cut, token by token.
    """

    expected = '{"text": ..., "label": ...}'

    @classmethod
    @abstractmethod
    def label(cls, line: Line) -> Any:
        """Return the label that a line has.

        Raises:
            UserError: naming the line, if it has none.
        """

    @classmethod
    def number(cls, line: Line, reading: Reading) -> np.ndarray:
        """Return what the model predicts of a line, [1]."""
        return np.array([cls.label(line)], dtype=np.float32)

    @classmethod
    def verify(cls, line: Line) -> None:
        text_of(line, "text", cls.expected)
        if SECOND in line.content:
            text_of(line, SECOND, cls.expected)
        cls.label(line)

    @classmethod
    def example(cls, line: Line, reading: Reading) -> Example:
        return cls.examples([line], reading)[0]

    @classmethod
    def examples(cls, lines: list[Line], reading: Reading) -> list[Example]:
        """Return all lines as examples: the tokenizer encodes many texts at once."""
        labels, texts, seconds = [], [], []
        for line in lines:
            cls.verify(line)
            texts.append(line.content["text"])
            labels.append(cls.number(line, reading))
            seconds.append(line.content.get(SECOND))
        encoded = reading.tokenizer.encode_batch(texts)
        pairs = iter(reading.tokenizer.encode_batch([text for text in seconds if text is not None]))
        return [
            _joined(ids, None if second is None else next(pairs), label, reading)
            for ids, second, label in zip(encoded, seconds, labels, strict=True)
        ]


def _joined(ids: list[int], second: list[int] | None, label: np.ndarray, reading: Reading) -> Example:
    """Return the example of one text, or of two."""
    end, between = [reading.end], 0 if second is None else ENDS
    rest = second or []
    length = len(ids) + len(rest) + ENDS + between
    keep, keep_rest = len(ids), len(rest)
    left = reading.most - ENDS - between
    if second is not None and left < ENDS:
        raise UserError(f"data.sequence_length {reading.most}: pairs of texts need at least {3 * ENDS}")
    if length > reading.most:
        keep, keep_rest = _shares(len(ids), len(rest), left)
    tokens = [*end, *ids[:keep], *end]
    if second is not None:
        tokens += [*end, *rest[:keep_rest], *end]
    return Example(np.array(tokens, dtype=np.int64), length, np.zeros(1, dtype=np.int64), label)


def _shares(first: int, second: int, left: int) -> tuple[int, int]:
    """Return how many tokens of two texts stay if the longer one is cut, token by token, until both together
    have `left`; of equally long ones the first.
    """
    half = left // 2
    if first <= half:
        return first, left - first
    if second <= left - half:
        return left - second, second
    return half, left - half


@register("objective", "classification")
class Classification(TextObjective):
    """Predict the label of a text: cross entropy over `model.num_labels` labels of one pooled hidden state.

    `data.sources` names a file of lines `{"text": ..., "label": "..."}`, beside which `labels.json` lists the
    labels, as tools/finetune.py writes them. A line may have a `second` text: then the label is that of the
    pair.

    Source: Devlin et al. 2018 (BERT), section 4.1.
    """

    predicts = "label"

    @classmethod
    def label(cls, line: Line) -> str:
        label = line.content.get("label")
        if not isinstance(label, str):
            raise UserError(f"{line.where}: expected {cls.expected} with two strings")
        return label

    @classmethod
    def number(cls, line: Line, reading: Reading) -> np.ndarray:
        return np.array([number_of(line, cls.label(line), reading.labels)], dtype=np.int64)

    def evaluation_sums(self, batch: Batch, logits: Tensor | None) -> dict[str, Tensor]:
        """Return the number of texts whose label has the largest logit."""
        assert logits is not None
        return right_share(batch, logits.argmax(1)[:, None])

    def prediction(self, example: Example, logits: Tensor) -> dict[str, Any]:
        """Return the `label` with the largest logit and the `probability` of each; logits: [labels]."""
        probs_C = logits.double().softmax(0)
        return {"label": self.labels[int(probs_C.argmax())], "probabilities": probs_C.tolist()}


@register("objective", "regression")
class Regression(TextObjective):
    """Predict a number of a text, or of a pair of texts: squared error of one output on a pooled state.

    `data.sources` names a file of lines `{"text": ..., "label": 1.5}`, which may have a `second` text, as
    tools/finetune.py writes them.

    Source: Devlin et al. 2018 (BERT), section 4.1 (STS-B).
    """

    predicts = "number"
    outputs = 1
    metrics = ("squared_error",)

    @classmethod
    def label(cls, line: Line) -> float:
        number = line.content.get("label")
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not abs(number) <= LARGEST:  # also refuses NaN
            raise UserError(f"{line.where}: label {str(number)[:60]!r}, expected a finite number of fp32")
        return float(number)

    def evaluation_sums(self, batch: Batch, logits: Tensor | None) -> dict[str, Tensor]:
        """Return the sum of the squared errors."""
        assert logits is not None
        error_B = (logits[:, 0] - batch.labels_BS[:, 0]).square()
        return {"squared_error": (error_B * batch.loss_mask_BS[:, 0]).sum()}

    def prediction(self, example: Example, logits: Tensor) -> dict[str, Any]:
        """Return the number as `label`; logits: [1]."""
        return {"label": float(logits.to(torch.float64)[0])}
