"""Translates sentences with an encoder-decoder: beam search, greedy, or draws."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.beam_search import BeamOptions, Hypothesis, agreement, beam_search, never_written
from megamoe.apps.generation.languages import Sentences, TranslationDirection
from megamoe.apps.generation.runner import CachedSourceRunner, PlainSourceRunner, Runner
from megamoe.apps.generation.sampling import Sampling
from megamoe.errors import UserError


@dataclass(frozen=True)
class Lengths:
    """The most tokens of a translation, its end token included.

    longest: whatever the source; None: data.sequence_length. beyond: more than the source has, tag and end
    included (Vaswani et al. 2017, section 6.1: 50).

    Raises:
        UserError: for a value out of its range.
    """

    longest: int | None = None
    beyond: int = 50

    def __post_init__(self) -> None:
        if self.longest is not None and self.longest < 1:
            raise UserError(f"--max-length: found {self.longest}, expected at least 1")
        if self.beyond < 0:
            raise UserError(f"--max-extra: found {self.beyond}, expected at least 0")

    def limit(self, source: int, trained: TrainedModel, prefix: int) -> int:
        """Return the most tokens after the prefix for a source of so many tokens."""
        most = trained.config.data.sequence_length - prefix
        return max(1, min(most, self.longest or most, source + self.beyond))


@dataclass(frozen=True)
class Drawing:
    """Independent draws from the model instead of a search. min_length, n_best: as in `BeamOptions`."""

    sampling: Sampling
    min_length: int = 1
    n_best: int = 1


@dataclass(frozen=True)
class _Task:
    """A source that is translated. key: of its draws. number: its place in the input."""

    number: int
    tokens: list[int]
    limit: int
    key: int = 0


def translate(
    trained: TrainedModel,
    direction: TranslationDirection,
    sentences: Sentences,
    search: BeamOptions | Drawing,
    lengths: Lengths,
    *,
    batch_size: int = 32,
    cached: bool = True,
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sentence, the best first; none of a blank one. Collective over all ranks.

    Sources of similar lengths form a batch. cached: see `runner.prepare`, which tells whether a model can;
    otherwise every source is translated by itself.
    """
    tasks = []
    seen: Counter[tuple[int, ...]] = Counter()
    for number, tokens in enumerate(sentences.tokens):
        limit = lengths.limit(len(tokens), trained, len(direction.target_prefix))
        if tokens and isinstance(search, BeamOptions):
            tasks.append(_Task(number, tokens, limit))
        elif tokens and isinstance(search, Drawing):
            for _ in range(search.n_best):
                key = search.sampling.key_of(tokens, seen[tuple(tokens)])
                tasks.append(_Task(number, tokens, limit, key))
                seen[tuple(tokens)] += 1
    tasks.sort(key=lambda task: -len(task.tokens))
    found: list[list[Hypothesis]] = [[] for _ in sentences.tokens]
    size = batch_size if cached else 1
    for first in range(0, len(tasks), size):
        batch = tasks[first : first + size]
        for task, hypotheses in zip(batch, _batch(trained, direction, batch, search, cached), strict=True):
            found[task.number] += hypotheses
    return [sorted(each, key=lambda one: -one.score) for each in found]


def _batch(
    trained: TrainedModel,
    direction: TranslationDirection,
    batch: list[_Task],
    search: BeamOptions | Drawing,
    cached: bool,
) -> list[list[Hypothesis]]:
    end = trained.vocabulary.eod
    assert end is not None
    prefix = [end, *direction.target_prefix]
    sources, limits = [task.tokens for task in batch], [task.limit for task in batch]
    runner: Runner = (
        CachedSourceRunner(trained, sources, prefix, max(limits))
        if cached
        else PlainSourceRunner(trained, sources, prefix)
    )
    forbidden = never_written(trained)
    agree = agreement(trained)
    if isinstance(search, BeamOptions):
        return beam_search(runner, limits, search, end=end, forbidden=forbidden, agree=agree)
    keys = [task.key for task in batch]
    drawn = draw(runner, limits, search, keys, end=end, forbidden=forbidden, agree=agree)
    return [[hypothesis] for hypothesis in drawn]


@torch.no_grad()
def draw(
    runner: Runner,
    limits: Sequence[int],
    drawing: Drawing,
    keys: list[int],
    *,
    end: int,
    forbidden: Sequence[int] = (),
    agree: Callable[[Tensor], None] = lambda tensor: None,
) -> list[Hypothesis]:
    """Return a draw of each sequence; arguments as `beam_search`.

    keys: of each sequence's draws, see `Sampling`. The log probabilities are the model's own, of which
    temperature, top-k and top-p are no part; the score is their mean.
    """
    tokens: list[list[int]] = [[] for _ in limits]
    totals = [0.0] * len(limits)
    active, logits_RV = list(range(len(limits))), runner.begin()
    while True:
        place = len(tokens[active[0]])
        banned = [*forbidden, *([end] if place < drawing.min_length else [])]
        index = torch.tensor(banned, dtype=torch.int64, device=logits_RV.device)
        allowed_RV = logits_RV.index_fill(1, index, -math.inf)
        new = drawing.sampling.choose(allowed_RV, [keys[number] for number in active], place)
        new_R = torch.tensor(new, device=logits_RV.device)
        agree(new_R)
        new = new_R.tolist()
        log_R = logits_RV.log_softmax(1).gather(1, new_R[:, None])[:, 0].tolist()
        going = []
        for row, (number, token) in enumerate(zip(active, new, strict=True)):
            tokens[number].append(token)
            totals[number] += log_R[row]
            if token != end and len(tokens[number]) < limits[number]:
                going.append(row)
        if not going:
            columns = zip(tokens, totals, strict=True)
            return [Hypothesis(each, total, total / len(each)) for each, total in columns]
        logits_RV = runner.feed([new[row] for row in going], going)
        active = [active[row] for row in going]
