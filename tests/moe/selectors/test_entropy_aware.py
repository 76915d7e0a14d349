"""entropy_aware: the perplexity of a token's score function is how many experts it gets, within bounds."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe.composition import check_parts
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from tests.moe.build import gradient_of, make_part, make_router, make_scored, moe_config, route_scores

# Perplexities: 1, 2, 4, exp(0.802) = 2.23, exp(1.280) = 3.60
PROBS = torch.tensor(
    [[1.0, 0, 0, 0], [0.5, 0, 0.5, 0], [0.25, 0.25, 0.25, 0.25], [0.1, 0.7, 0.2, 0], [0.1, 0.2, 0.3, 0.4]]
)


def route(scored: Scored, num_experts: int = 4, **options: Any) -> Pairs:
    pairs: Pairs = make_part("selector", "entropy_aware", num_experts, **options)(scored, StepContext())
    return pairs


def counts(pairs: Pairs, num_tokens: int) -> list[int]:
    found: list[int] = torch.bincount(pairs.token_N, minlength=num_tokens).tolist()
    return found


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
    found = counts(route(make_scored(probs_TE, probs_TE), num_experts=12, max_k=8), 60)
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


@pytest.mark.parametrize("weights", ["raw", "renormalised"])
def test_weights_and_their_gradients(weights: str) -> None:
    gradients = []
    for plain in (False, True):
        scores_E = torch.tensor([0.4, 2.0, 1.1, -1.5], dtype=torch.float64, requires_grad=True)
        probs_E = scores_E.exp() / scores_E.exp().sum()
        if plain:
            weight_N: Tensor = torch.stack([probs_E[1], probs_E[2], probs_E[0]])
            weight_N = weight_N if weights == "raw" else weight_N / (probs_E[1] + probs_E[2] + probs_E[0])
        else:
            weight_N = route(make_scored(scores_E[None], probs_E[None]), weights=weights).weight_N
        (weight_N * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
        gradients.append(torch.cat([weight_N.detach(), gradient_of(scores_E)]))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_k": 0}, "min_k must be at least 1 and at most max_k"),
        ({"min_k": 3, "max_k": 2}, "min_k must be at least 1 and at most max_k"),
        ({"max_k": 1, "weights": "renormalised"}, "with max_k: 1 .* set weights: raw"),
    ],
)
def test_bounds_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        moe_config(router={"selector": {"name": "entropy_aware", **options}})


def test_no_more_choices_than_experts() -> None:
    config = moe_config(num_experts=4, router={"selector": {"name": "entropy_aware", "max_k": 5}})
    with pytest.raises(UserError, match="entropy_aware: max_k is 5, .* only 4 experts .* max_k <= 4$"):
        check_parts(config, 1)


def test_experts_stand_in_the_order_of_scores_whose_p_round_to_1() -> None:
    router = make_router(4, score_function="sigmoid", selector={"name": "entropy_aware", "max_k": 3})
    assert route_scores(router, torch.tensor([[17.0, 18, 20, 19]])).pairs.expert_N.tolist() == [2, 3, 1]
