"""`entropy_prune`: by hand, and against dropping one expert after the other."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from tests.support.moe.build import (
    make_hidden,
    make_layer,
    make_part,
    make_router,
    make_scored,
    moe_config,
    route_scores,
)


def prune(scores_TE: Tensor, candidates_TE: Tensor | None = None, **options: Any) -> Tensor:
    part = make_part("mask", "entropy_prune", num_experts=scores_TE.shape[1], **options)
    return part(make_scored(scores_TE, candidates_TE=candidates_TE), StepContext())


@pytest.mark.parametrize(
    ("bound", "expected"),
    [(1.03, [1, 1, 1]), (1.02, [0, 1, 1]), (0.67, [0, 1, 1]), (0.66, [0, 1, 0]), (0.0, [0, 1, 0])],
)
def test_by_hand(bound: float, expected: list[int]) -> None:
    """H(0.5, 0.3, 0.2) = 1.0297 and H(0.625, 0.375) = 0.6616."""
    assert prune(torch.tensor([[0.2, 0.5, 0.3]]).log(), bound=bound).int().tolist() == [expected]


def plain(row: list[float], bound: float) -> list[bool]:
    """Drop the least probable until the entropy is in bounds; at least one stays."""
    kept = sorted(range(len(row)), key=lambda i: -row[i])

    def entropy() -> float:
        total = sum(row[i] for i in kept)
        return -sum(row[i] / total * math.log(row[i] / total) for i in kept)

    while len(kept) > 1 and entropy() > bound:
        kept.pop()
    return [i in kept for i in range(len(row))]


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("bound", [0.0, 0.3, 0.9, 1.2])
def test_dropping_one_after_the_other_says_the_same(bound: float, num_groups: int) -> None:
    scores_TE = 2 * torch.randn(50, 12, generator=torch.Generator().manual_seed(4))
    allowed_TE = prune(scores_TE, bound=bound, num_groups=num_groups)
    probs_TGL = scores_TE.double().softmax(1).view(50, num_groups, -1)
    expected = [[kept for group in token for kept in plain(group, bound)] for token in probs_TGL.tolist()]
    assert allowed_TE.tolist() == expected
    assert 0 < allowed_TE.sum() < 600


def test_what_an_earlier_mask_took_away_is_absent() -> None:
    scores_TE = torch.tensor([[9.0, 0.5, 0.0, -1.0]])
    candidates_TE = torch.tensor([[False, True, True, True]])
    allowed_TE = prune(scores_TE, candidates_TE, bound=0.7) & candidates_TE
    assert allowed_TE.tolist() == [[False, *plain(torch.tensor([0.5, 0.0, -1.0]).exp().tolist(), 0.7)]]
    assert allowed_TE.sum() == 2


def test_the_entropy_does_not_depend_on_the_groups_probability() -> None:
    scores_TE = torch.tensor([[0.0, -0.1, -1.0, -5.0]])
    both_TE = torch.cat([scores_TE, scores_TE - 70], dim=1)
    first, second = prune(both_TE, bound=0.8, num_groups=2).view(2, 4).tolist()
    assert first == second == [True, True, False, False]


def test_no_tokens_and_a_group_without_candidates() -> None:
    assert prune(torch.zeros(0, 8), num_groups=2).shape == (0, 8)
    candidates_TE = torch.tensor([[False, False, True, True]])
    allowed_TE = prune(torch.tensor([[0.0, 1.0, 0.0, 3.0]]), candidates_TE, num_groups=2, bound=0.1)
    assert (allowed_TE & candidates_TE).tolist() == [[False, False, False, True]]


def test_in_a_router_every_group_keeps_an_expert() -> None:
    prune_in_two = {"name": "entropy_prune", "num_groups": 2, "bound": 0.5}
    layer = make_layer(moe_config(num_experts=8, router={"masks": [prune_in_two]}))
    routing = layer.router(make_hidden(30), layer.context)
    assert routing.candidates_TE.view(30, 2, 4).any(-1).all()
    assert not routing.candidates_TE.all()
    assert routing.probs_TE.isfinite().all()


@pytest.mark.parametrize(("bound", "kept"), [(0.0, 1), (0.5, 1), (1.0, 2), (1.5, 4)])
def test_the_first_of_equal_experts_are_kept(bound: float, kept: int) -> None:
    """ln 2 = 0.69, ln 4 = 1.39, ln 5 = 1.6; 64 experts are more than those that are looked at first."""
    assert prune(torch.zeros(1, 64), bound=bound).nonzero()[:, 1].tolist() == list(range(kept))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_in_a_router_it_goes_by_the_score_functions_values(score_function: str, num_groups: int) -> None:
    scores_TE = 2 * torch.randn(50, 12, generator=torch.Generator().manual_seed(4))
    prune_some = {"name": "entropy_prune", "num_groups": num_groups, "bound": 0.9}
    routing = route_scores(make_router(12, score_function=score_function, masks=[prune_some]), scores_TE)
    probs_TE = scores_TE.double().softmax(1) if score_function == "softmax" else scores_TE.double().sigmoid()
    probs_TGL = probs_TE.view(50, num_groups, -1)
    expected = [[kept for group in token for kept in plain(group, 0.9)] for token in probs_TGL.tolist()]
    assert routing.candidates_TE is not None and routing.candidates_TE.tolist() == expected


def test_experts_whose_p_round_alike_go_by_their_scores() -> None:
    """Of four equal p two have entropy ln 2: those of the largest scores. A group of p 0 is treated
    equally.
    """
    prune_half = {"name": "entropy_prune", "bound": 0.7}
    router = make_router(4, score_function="sigmoid", masks=[prune_half])
    candidates_TE = route_scores(router, torch.tensor([[17.0, 18, 20, 19]])).candidates_TE
    assert candidates_TE is not None and candidates_TE.tolist() == [[False, False, True, True]]
    far = [0.0, -0.1, -1.0, -5.0]
    router = make_router(8, masks=[{**prune_half, "num_groups": 2, "bound": 0.8}])
    routing = route_scores(router, torch.tensor([[*far, *(score - 150 for score in far)]]))
    assert not routing.affinities_TE[:, 4:].any()
    assert routing.candidates_TE is not None
    assert routing.candidates_TE.tolist() == [[True, True, False, False] * 2]
