"""above: every expert whose p exceeds a value."""

from typing import Any

import torch

from tests.support.moe.build import make_router, make_scored, route_scores, select

PROBS = torch.tensor([[0.0, 3.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])


def chosen(**options: Any) -> list[list[int]]:
    pairs = select("above", make_scored(PROBS, PROBS), **options)
    assert torch.equal(pairs.weight_N, PROBS[pairs.token_N, pairs.expert_N])
    return [pairs.expert_N[pairs.token_N == token].tolist() for token in range(3)]


def test_by_hand() -> None:
    assert chosen() == [[1, 2], [], [3, 2, 1, 0]]
    assert chosen(value=0.5) == [[1], [], [3, 2, 1, 0]]
    assert chosen(value=0.5, at_least=2) == [[1, 2], [0, 1], [3, 2, 1, 0]]


def test_positive_scores_are_chosen_with_their_scores_as_weights() -> None:
    router = make_router(3, score_function="relu", selector="above")
    pairs = route_scores(router, torch.tensor([[2.0, -1.0, 3.0], [-1.0, -2.0, 0.0]])).pairs
    assert pairs.token_N.tolist() == [0, 0] and pairs.expert_N.tolist() == [2, 0]
    assert pairs.weight_N.tolist() == [3.0, 2.0]
