"""Beam search finds what an exhaustive search finds, and obeys its options."""

import itertools
import math
from typing import Any

import pytest
import torch

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.beam_search import BeamOptions, Hypothesis, beam_search
from megamoe.apps.generation.runner import Runner
from megamoe.errors import UserError
from tests.support.apps.encoder_decoders import END, opened, whole_batch

WORDS, LIMIT = 5, 4
SOURCES = [[3, 1, 4, END], [2, END]]
WIDE = WORDS**LIMIT  # no hypothesis is ever cut


def exhaustive(
    trained: TrainedModel, source: list[int], penalty: float, forbidden: list[int]
) -> list[tuple[float, list[int]]]:
    """Score every sequence of words that ends, or has LIMIT words, by whole passes; the best first."""
    found: dict[tuple[int, ...], float] = {}
    every = list(itertools.product(range(WORDS), repeat=LIMIT))
    log_BSV = whole_batch(trained, source, [[END, *words[:-1]] for words in every]).log_softmax(2)
    for words, log_SV in zip(every, log_BSV.tolist(), strict=True):
        length = words.index(END) + 1 if END in words else LIMIT
        if set(words[:length]) & set(forbidden) or length == 1:
            continue
        total = sum(log_SV[place][words[place]] for place in range(length))
        found[words[:length]] = total / length**penalty
    return sorted(((score, list(words)) for words, score in found.items()), reverse=True)


@pytest.mark.parametrize(("penalty", "forbidden"), [(1.0, []), (0.0, []), (2.5, [3]), (-0.5, [1])])
def test_a_wide_beam_is_an_exhaustive_search(one_rank: None, penalty: float, forbidden: list[int]) -> None:
    trained = opened(vocabulary=WORDS)
    options = BeamOptions(WIDE, penalty, n_best=60)
    runner = Runner(trained, [[END]] * len(SOURCES), LIMIT, sources=SOURCES)
    found = beam_search(runner, [LIMIT, LIMIT], options, end=END, forbidden=forbidden)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        wanted = exhaustive(trained, source, penalty, forbidden)[:60]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in wanted], abs=1e-5)
        assert [each.tokens for each in hypotheses[:5]] == [words for _, words in wanted[:5]]
        assert len({len(each.tokens) for each in hypotheses}) > 1


class Table:
    """Rows whose next token has fixed log probabilities by the words so far; it counts its rows."""

    def __init__(self, table: dict[str, dict[str, float]], sequences: int = 1) -> None:
        self.table, self.texts = table, [""] * sequences
        self.sizes: list[int] = []

    def begin(self) -> torch.Tensor:
        return self._logits()

    def feed(self, new: list[int], rows: list[int] | None = None) -> torch.Tensor:
        assert rows is not None
        self.texts = [self.texts[row] + "$abc"[word] for row, word in zip(rows, new, strict=True)]
        return self._logits()

    def _logits(self) -> torch.Tensor:
        self.sizes.append(len(self.texts))
        rows = [self.table.get(text, {"$": 1.0}) for text in self.texts]
        return torch.tensor([[math.log(row.get(word, 1e-9)) for word in "$abc"] for row in rows])


def search(table: Any, limits: list[int], **options: object) -> list[list[Hypothesis]]:
    return beam_search(table, limits, BeamOptions(**options), end=0)  # type: ignore[arg-type]


def test_what_has_ended_leaves_the_batch() -> None:
    table = Table({"": {"a": 1.0}, "a": {"$": 1.0}, "b": {"a": 1.0}, "ba": {"a": 1.0}, "baa": {"a": 1.0}})
    table.texts = ["", "b", ""]
    found = search(table, [6, 6, 6], beams=1)
    assert [row[0].tokens for row in found] == [[1, 0], [1, 1, 1, 0], [1, 0]]
    assert table.sizes == [3, 3, 1, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beams": 0}, "--beams: found 0"),
        ({"length_penalty": math.nan}, "--length-penalty: found nan"),
        ({"n_best": 5}, "--n-best: found 5, expected 1 to --beams 4"),
    ],
)
def test_values_out_of_range(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        BeamOptions(**options)  # type: ignore[arg-type]


def test_a_broken_model_is_named() -> None:
    class Broken(Table):
        def _logits(self) -> torch.Tensor:
            return torch.full((1, 4), math.nan)

    with pytest.raises(UserError, match="logits are not finite"):
        search(Broken({}), [3])
    with pytest.raises(UserError, match="every token is forbidden"):
        nothing: Any = Table({})
        beam_search(nothing, [3], BeamOptions(), end=0, forbidden=[1, 2, 3])
