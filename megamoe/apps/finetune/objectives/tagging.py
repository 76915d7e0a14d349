"""Tagging: an encoder reads the words of a sentence and predicts the tag of each."""

from bisect import bisect_right
from typing import Any

import numpy as np
from torch import Tensor

from megamoe.apps.finetune.label_files import Line
from megamoe.apps.finetune.objectives.labelled import ENDS, Example, Labelled, Reading, number_of, right_share
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.registry import register

EXPECTED = '{"words": [...], "tags": [...]}'


@register("objective", "tagging")
class Tagging(Labelled):
    """Predict the tag of each word from the hidden state of its first token: cross entropy over
    `model.num_labels` tags, averaged over all words.

    `data.sources` names a file of lines `{"words": [...], "tags": [...]}`, as tools/finetune.py writes them.
    The words are joined by spaces and encoded together, between two end-of-document tokens.

    Source: Devlin et al. 2018 (BERT), section 5.3.
    """

    predicts = "tags"

    @classmethod
    def verify(cls, line: Line) -> None:
        _words(line)

    @classmethod
    def example(cls, line: Line, reading: Reading) -> Example:
        """See `Labelled`. Words whose first token was cut off have no label."""
        words, tags = _words(line)
        ids, spans = reading.tokenizer.encode_with_spans(" ".join(words))
        ends = [end for _, end in spans]
        first, place = [], 0
        for word in words:
            first.append(1 + bisect_right(ends, place))  # of the token with the word's first character
            place += len(word) + 1
        kept = ids[: reading.most - ENDS]
        places = [number for number in first if number <= len(kept)]
        labels = [number_of(line, tag, reading.labels) for tag in tags]
        return Example(
            np.array([reading.end, *kept, reading.end], dtype=np.int64),
            len(ids) + ENDS,
            np.array(places, dtype=np.int64),
            np.array(labels[: len(places)], dtype=np.int64),
        )

    def evaluation_sums(self, batch: Batch, logits: Tensor | None) -> dict[str, Tensor]:
        """Return the number of words whose tag has the largest logit."""
        assert logits is not None
        return right_share(batch, logits.argmax(2))

    def prediction(self, example: Example, logits: Tensor) -> dict[str, Any]:
        """Return the `tags` of the words that were not cut off; logits: [S, tags]."""
        return {"tags": [self.labels[int(logits[place].argmax())] for place in example.places_P]}


def _words(line: Line) -> tuple[list[str], list[str]]:
    """Return the words and the tags of a line."""
    found = line.content if isinstance(line.content, dict) else {}
    words, tags = found.get("words"), found.get("tags")
    if not (_texts(words) and _texts(tags)):
        raise UserError(f"{line.where}: expected {EXPECTED} with lists of strings, at least one in each")
    assert isinstance(words, list) and isinstance(tags, list)
    if len(words) != len(tags):
        raise UserError(f"{line.where}: {len(words)} words and {len(tags)} tags; expected one tag a word")
    if not all(word.strip() for word in words):
        raise UserError(f"{line.where}: word {1 + [bool(w.strip()) for w in words].index(False)} is empty")
    return words, tags


def _texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
