"""Beam search over batches of sequences, from the logits alone, by the rules of transformers' `generate`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megamoe.apps.generation.runner import Runner
from megamoe.apps.generation.sampling import finite_norms
from megamoe.errors import UserError

MOST_BEAMS = 10_000


@dataclass(frozen=True)
class BeamOptions:
    """How hypotheses are found and compared.

    beams: hypotheses that are continued, K; 1: greedy. length_penalty: p of the score log P(y) / |y|^p, where
    |y| counts the end token (transformers' convention; 0: none, 1: the mean log probability of a token). It
    is not that of Wu et al. 2016, equation 14, whose divisor is ((5 + |y|) / 6)^p. n_best: the number of
    hypotheses to return, at most K.

    Raises:
        UserError: for a value out of its range.
    """

    beams: int = 4
    length_penalty: float = 1.0
    n_best: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.beams <= MOST_BEAMS:
            raise UserError(f"--beams: found {self.beams}, expected 1 to {MOST_BEAMS}; 1 is greedy")
        if not math.isfinite(self.length_penalty) or abs(self.length_penalty) > 100:
            raise UserError(f"--length-penalty: found {self.length_penalty:g}, expected -100 to 100")
        if not 1 <= self.n_best <= self.beams:
            raise UserError(
                f"--n-best: found {self.n_best}, expected 1 to --beams {self.beams}; raise --beams"
            )


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence.

    tokens: with the end token, if it did not end at the limit. log_probability: the sum over them, in nats.
    score: what hypotheses are compared by.
    """

    tokens: list[int]
    log_probability: float
    score: float


@dataclass(frozen=True)
class _Running:
    """A hypothesis that goes on. parent: its place among the sequence's hypotheses before its last token."""

    log_probability: float
    tokens: list[int]
    parent: int = 0


@dataclass
class _Sequence:
    """The hypotheses of one sequence, the best first. limit: the most tokens of one."""

    limit: int
    running: list[_Running] = field(default_factory=lambda: [_Running(0.0, [])])
    finished: list[Hypothesis] = field(default_factory=list)

    def advance(self, candidates: list[tuple[float, int, int]], options: BeamOptions, end: int) -> None:
        """Take the best 2 K continuations (log probability, parent, token), the best first.

        Only the first K of them may finish, as in transformers: the others exist so that K go on.
        """
        going: list[_Running] = []
        for rank, (total, parent, token) in enumerate(candidates):
            if total == -math.inf:
                break
            tokens = [*self.running[parent].tokens, token]
            if token != end and len(tokens) < self.limit:
                going.append(_Running(total, tokens, parent))
            elif rank < options.beams:
                score = total / len(tokens) ** options.length_penalty
                self.finished.append(Hypothesis(tokens, total, score))
        self.running = going[: options.beams]
        self.finished = sorted(self.finished, key=lambda one: -one.score)[: options.beams]

    def has_ended(self, options: BeamOptions) -> bool:
        """Return whether the best running hypothesis would score no better than K finished, if it ended."""
        if not self.running:
            return True
        if len(self.finished) < options.beams:
            return False
        best = self.running[0]
        score = best.log_probability / len(best.tokens) ** options.length_penalty
        return options.beams == 1 or score <= self.finished[-1].score


@torch.no_grad()
def beam_search(
    runner: Runner,
    limits: Sequence[int],
    options: BeamOptions,
    *,
    end: int,
    forbidden: Sequence[int] = (),
    agree: Callable[[Tensor], None] = lambda tensor: None,
) -> list[list[Hypothesis]]:
    """Return the best hypotheses of each sequence, the best first; at least one of each.

    limits: the most tokens of each sequence, the end token included; at least 1. end: the token that ends a
    hypothesis, but not as its first one. forbidden: tokens that are never written. agree: overwrites a tensor
    with the first rank's, where several ranks compute the same. Sequences that have ended leave the batch.

    Raises:
        UserError: if logits are not finite, or if all tokens are forbidden.
    """
    found = [_Sequence(limit) for limit in limits]
    active, logits_RV, banned = found, runner.begin(), [*forbidden, end]
    while True:
        candidates = _best(logits_RV, active, banned, options, agree)
        banned = [*forbidden]
        width = len(logits_RV) // len(active)
        going = []
        for place, sequence in enumerate(active):
            sequence.advance(candidates[place], options, end)
            if not (sequence.running or sequence.finished):
                raise UserError("every token is forbidden or has probability 0")
            if not sequence.has_ended(options):
                going.append((place, sequence))
        if not going:
            return [sequence.finished[: options.n_best] for sequence in found]
        size = max(len(sequence.running) for _, sequence in going)
        new, parents = [], []
        for place, sequence in going:
            missing = size - len(sequence.running)
            new += [each.tokens[-1] for each in sequence.running] + [end] * missing
            parents += [place * width + each.parent for each in sequence.running] + [place * width] * missing
        # Neighbours of a sequence stay neighbours, whatever their order: `SourceCache` relies on it.
        active, logits_RV = [sequence for _, sequence in going], runner.feed(new, parents)


def _best(
    logits_RV: Tensor,
    active: list[_Sequence],
    banned: list[int],
    options: BeamOptions,
    agree: Callable[[Tensor], None],
) -> list[list[tuple[float, int, int]]]:
    """Return the best 2 K continuations of each sequence: (log probability, parent, token).

    The probabilities of banned tokens are not spread over the others, as in transformers. Of a row's tokens
    only its own best 2 K can be among them.
    """
    width, most = len(logits_RV) // len(active), 2 * options.beams
    totals = [
        [each.log_probability for each in sequence.running] + [-math.inf] * (width - len(sequence.running))
        for sequence in active
    ]
    total_R = torch.tensor(totals, device=logits_RV.device).flatten()
    norm_R = finite_norms(logits_RV)
    allowed_RV = logits_RV.index_fill(
        1, torch.tensor(banned, dtype=torch.int64, device=logits_RV.device), -math.inf
    )
    top_RC, token_RC = allowed_RV.topk(min(most, logits_RV.shape[1]), dim=1)
    scores_BN = (top_RC - norm_R[:, None] + total_R[:, None]).view(len(active), -1)
    best_BM, place_BM = scores_BN.topk(min(most, scores_BN.shape[1]), dim=1)
    parent_BM = place_BM // top_RC.shape[1]
    token_BM = token_RC.view(len(active), -1).gather(1, place_BM)
    for tensor in (best_BM, parent_BM, token_BM):
        agree(tensor)
    columns = zip(best_BM.tolist(), parent_BM.tolist(), token_BM.tolist(), strict=True)
    return [list(zip(*each, strict=True)) for each in columns]
