"""Extractive question answering: an encoder reads a question and a context, and marks the answer in it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe.apps.finetune.label_files import Line
from megamoe.apps.finetune.objectives.labelled import ENDS, Example, Labelled, Reading, right_share, text_of
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.registry import register

EXPECTED = '{"question": ..., "context": ..., "answers": {"text": [...], "answer_start": [...]}}'
SIDES = 2  # of a span: its first and its last token


@register("objective", "span")
class Span(Labelled):
    """Predict where the answer of a question stands in a text: cross entropy of its first and of its last
    token over the positions, averaged.

    `data.sources` names a file of lines `{"question": ..., "context": ..., "answers": {"text": [...],
    "answer_start": [...]}}`, as tools/finetune.py writes them. The end-of-document token stands before and
    after the question and the context. Of an example that is too long the context is cut; where this cuts off
    the answer, the example has no loss. The first answer is learned.

    Source: Devlin et al. 2018 (BERT), section 4.2.
    """

    predicts = "span"
    outputs = SIDES

    @dataclass
    class Config(Labelled.Config):
        __doc__ = f"""{Labelled.Config.__doc__ or ""}
        longest: the most tokens of a predicted answer.
        """
        longest: int = 30

    @classmethod
    def verify(cls, line: Line) -> None:
        text_of(line, "question", EXPECTED)
        _answer(line, text_of(line, "context", EXPECTED))

    @classmethod
    def example(cls, line: Line, reading: Reading) -> Example:
        question, context = (text_of(line, key, EXPECTED) for key in ("question", "context"))
        start, end = _answer(line, context)
        asked = reading.tokenizer.encode(question)
        ids, spans = reading.tokenizer.encode_with_spans(context)
        first = len(asked) + ENDS + 1  # the position of the context's first token
        room = reading.most - first - 1
        if room < 1:
            raise UserError(
                f"{line.where}: the question has {len(asked)} tokens, which leave none of sequence_length "
                f"{reading.most} for the context, and only contexts are cut; raise it to at least "
                f"{first + 2}, or shorten the question"
            )
        kept = ids[:room]
        inside = [place for place, (low, high) in enumerate(spans) if high > start and low < end]
        learned = bool(inside) and inside[-1] < len(kept)
        labels = [first + inside[0], first + inside[-1]] if learned else []
        ends = [reading.end]
        return Example(
            np.array([*ends, *asked, *ends, *ends, *kept, *ends], dtype=np.int64),
            first + len(ids) + 1,
            np.arange(len(labels), dtype=np.int64),
            np.array(labels, dtype=np.int64),
            (*((0, 0),) * first, *spans[:room], (0, 0)),
        )

    @classmethod
    def check(cls, options: Any, config: Any) -> None:
        super().check(options, config)
        if options.longest < 1:
            raise ValueError(f"longest: found {options.longest}, expected at least 1")

    def evaluation_sums(self, batch: Batch, logits: Tensor | None) -> dict[str, Tensor]:
        """Return the number of first and of last tokens that have the largest score."""
        assert logits is not None
        best_B2 = logits.argmax(1)
        rest = batch.labels_BS.shape[1] - SIDES
        return right_share(batch, torch.nn.functional.pad(best_B2, (0, rest)))

    def prediction(self, example: Example, logits: Tensor) -> dict[str, Any]:
        """Return `start` and `end`, the characters of the answer in the context; logits: [S, 2].

        Of all spans of at most `longest` tokens inside the context, it is the one with the largest sum of the
        scores of its first and its last token; of equal ones the first.
        """
        inside = [place for place, (low, high) in enumerate(example.spans) if high > low]
        if not inside:
            return {"start": 0, "end": 0}
        score_N2 = logits[inside[0] : inside[-1] + 1].double()
        number = torch.arange(len(score_N2))
        span_NN = number[None, :] - number[:, None]
        allowed_NN = (span_NN >= 0) & (span_NN < self.options.longest)
        sum_NN = (score_N2[:, :1] + score_N2[:, 1]).masked_fill(~allowed_NN, float("-inf"))
        first, last = divmod(int(sum_NN.argmax()), len(score_N2))
        return {"start": example.spans[inside[0] + first][0], "end": example.spans[inside[0] + last][1]}


def _answer(line: Line, context: str) -> tuple[int, int]:
    """Return the [start, end) of the first answer in the context."""
    answers = line.content.get("answers")
    texts, starts = (
        answers.get(key) if isinstance(answers, dict) else None for key in ("text", "answer_start")
    )
    if not (isinstance(texts, list) and isinstance(starts, list) and texts and len(texts) == len(starts)):
        raise UserError(f"{line.where}: expected {EXPECTED} with at least one answer")
    for text, start in zip(texts, starts, strict=True):
        if not (isinstance(text, str) and text.strip() and type(start) is int and start >= 0):
            raise UserError(f"{line.where}: expected answers of a text and the number of its first character")
        if context[start : start + len(text)] != text:
            raise UserError(
                f"{line.where}: the answer {text[:60]!r} is not at character {start} of the context, where "
                f"{context[start : start + len(text)][:60]!r} stands; correct answer_start"
            )
    return starts[0], starts[0] + len(texts[0])
