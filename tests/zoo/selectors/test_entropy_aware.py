"""entropy_aware: a token gets as many experts as the perplexity of its p, within bounds."""

import math
from functools import partial

import torch

from megamoe.moe.routing import Pairs
from tests.support.moe.build import make_scored, select

# Perplexities: 1, 2, 4, exp(0.802) = 2.23, exp(1.280) = 3.60
PROBS = torch.tensor(
    [[1.0, 0, 0, 0], [0.5, 0, 0.5, 0], [0.25, 0.25, 0.25, 0.25], [0.1, 0.7, 0.2, 0], [0.1, 0.2, 0.3, 0.4]]
)


route = partial(select, "entropy_aware")


def counts(pairs: Pairs, num_tokens: int) -> list[int]:
    return torch.bincount(pairs.token_N, minlength=num_tokens).tolist()


def test_by_hand() -> None:
    pairs = route(make_scored(PROBS, PROBS))
    assert counts(pairs, 5) == [1, 2, 4, 2, 4]
    of_the_fourth = pairs.token_N == 3
    assert pairs.expert_N[of_the_fourth].tolist() == [1, 2]
    assert pairs.choice_N[of_the_fourth].tolist() == [0, 1]
    torch.testing.assert_close(pairs.weight_N[of_the_fourth], torch.tensor([0.7, 0.2]))


def test_within_bounds() -> None:
    assert counts(route(make_scored(PROBS, PROBS), min_k=2, max_k=3), 5) == [2, 2, 3, 2, 3]


def test_against_the_formula() -> None:
    probs_TE = torch.randn(60, 12, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    found = counts(route(make_scored(probs_TE, probs_TE), max_k=8), 60)
    for token, probs in enumerate(probs_TE.double().tolist()):
        perplexity = math.prod(p**-p for p in probs)
        assert found[token] == min(round(perplexity), 8)
    assert len(set(found)) > 4


def test_values_that_do_not_sum_to_1_count_by_their_share() -> None:
    assert counts(route(make_scored(PROBS, PROBS * 1.7)), 5) == [1, 2, 4, 2, 4]


def test_masks_and_values_of_0() -> None:
    candidates_TE = torch.tensor([[True, True, False, False], [False] * 4, [True] * 4])
    probs_TE = torch.tensor([[0.5, 0.5, 0, 0], [0.0] * 4, [0.0] * 4])
    pairs = route(make_scored(torch.zeros(3, 4), probs_TE, candidates_TE), min_k=3, weights="renormalised")
    assert counts(pairs, 3) == [2, 0, 3]
    assert pairs.weight_N.tolist() == [0.5, 0.5, 0, 0, 0]
