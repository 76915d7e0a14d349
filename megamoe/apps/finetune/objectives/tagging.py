"""Tagging: an encoder reads the words of a sentence and predicts the tag of each."""

from bisect import bisect_right
from typing import Any

import numpy as np
from torch import Tensor

from megamoe.apps.finetune.label_files import NO_TAG, Line
from megamoe.apps.finetune.objectives.labelled import ENDS, Example, Labelled, Reading, number_of, right_share
from megamoe.data.batches import Batch
from megamoe.data.tokenizers import Tokenizer
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
        """See `Labelled`. Words without a token, or whose first token was cut off, have no label."""
        words, tags = _words(line)
        ids, spans = reading.tokenizer.encode_with_spans(" ".join(words))
        kept = ids[: reading.most - ENDS]
        firsts = first_tokens(words, spans, reading.tokenizer)
        places = [0 if token is None or token >= len(kept) else 1 + token for token in firsts]
        labels = [number_of(line, tag, reading.labels) for tag in tags]
        return Example(
            np.array([reading.end, *kept, reading.end], dtype=np.int64),
            len(ids) + ENDS,
            np.array([place for place in places if place], dtype=np.int64),
            np.array([label for label, place in zip(labels, places, strict=True) if place], dtype=np.int64),
            words=tuple(places),
        )

    def evaluation_sums(self, batch: Batch, logits: Tensor | None) -> dict[str, Tensor]:
        """Return the number of words whose tag has the largest logit."""
        assert logits is not None
        return right_share(batch, logits.argmax(2))

    def prediction(self, example: Example, logits: Tensor) -> dict[str, Any]:
        """Return the `tags` of all words, NO_TAG for those without a label; logits: [S, tags]."""
        best = [self.labels[int(logits[place].argmax())] if place else NO_TAG for place in example.words]
        return {"tags": best}


def first_tokens(words: list[str], spans: list[tuple[int, int]], tokenizer: Tokenizer) -> list[int | None]:
    """Return the number of each word's first token; None for a word that the tokenizer removes.

    spans: the characters' [start, end) of each token of the words, joined by spaces. If two words have the
    same token, the second has none, unless the first is removed: SentencePiece counts what it removes to a
    token beside it.
    """
    ends = [end for _, end in spans]
    word_of: dict[int, int] = {}
    start = 0
    for number, word in enumerate(words):
        token = bisect_right(ends, start)  # the first one that ends behind the word's first character
        begins_before = token < len(spans) and spans[token][0] < start + len(word)
        owner = word_of.get(token)
        if begins_before and (owner is None or not tokenizer.decode(tokenizer.encode(words[owner])).strip()):
            word_of[token] = number
        start += len(word) + 1
    token_of = {number: token for token, number in word_of.items()}
    return [token_of.get(number) for number in range(len(words))]


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
