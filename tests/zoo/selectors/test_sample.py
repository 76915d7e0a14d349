"""Drawing experts: frequencies, order, keys, weights, and none of it in evaluation."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from tests.support.moe.build import make_router, make_scored, route_scores, select
from tests.support.moe.draws import check_keys, rows_of

PROBS = torch.tensor([0.5, 0.1, 0.3, 0.1])
DRAWS = 20000


def draw(k: int, probs_E: Tensor = PROBS, **scored: Tensor) -> Tensor:
    """int64 [T, K]: the experts of `DRAWS` tokens that are all alike."""
    probs_TE = probs_E.expand(DRAWS, -1)
    pairs = select("sample", make_scored(probs_TE.log(), probs_TE, **scored), StepContext(seed=1), k=k)
    assert torch.equal(pairs.token_N, torch.arange(DRAWS).repeat_interleave(k))
    assert torch.equal(pairs.choice_N, torch.arange(k).repeat(DRAWS))
    return pairs.expert_N.reshape(DRAWS, k)


def test_one_expert_is_drawn_in_proportion_to_p() -> None:
    found_E = torch.bincount(draw(1)[:, 0], minlength=4) / DRAWS
    torch.testing.assert_close(found_E, PROBS, atol=0.012, rtol=0)  # over 3 standard deviations


def test_two_experts_are_drawn_without_replacement_in_order() -> None:
    drawn_TK = draw(2)
    found = (
        torch.zeros(4, 4).index_put_(tuple(drawn_TK.unbind(1)), torch.tensor(1.0), accumulate=True) / DRAWS
    )
    expected = torch.zeros(4, 4)
    for first, second in itertools.permutations(range(4), 2):
        expected[first, second] = PROBS[first] * PROBS[second] / (1 - PROBS[first])
    assert found.diagonal().sum() == 0
    torch.testing.assert_close(found, expected, atol=0.012, rtol=0)


def test_all_experts_are_drawn_if_k_is_e() -> None:
    assert torch.equal(draw(4).sort(1).values, torch.arange(4).expand(DRAWS, 4))


def test_values_that_do_not_sum_to_1_are_drawn_in_proportion() -> None:
    """A sigmoid's values do not sum to 1."""
    found_E = torch.bincount(draw(1, PROBS * 1.8)[:, 0], minlength=4) / DRAWS
    torch.testing.assert_close(found_E, PROBS, atol=0.012, rtol=0)


def test_the_scorer_may_say_what_to_draw_from() -> None:
    """Up to a constant a token, as scores are; the weights stay the score function's."""
    other_E = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn_TK = draw(1, sampling_scores_TE=other_E.log().expand(DRAWS, -1) + 3)
    found_E = torch.bincount(drawn_TK[:, 0], minlength=4) / DRAWS
    torch.testing.assert_close(found_E, other_E, atol=0.012, rtol=0)


@pytest.mark.parametrize("sampling", [False, True])
def test_only_candidates_are_drawn(sampling: bool) -> None:
    candidates_TE = torch.tensor([False, True, True, True]).expand(DRAWS, 4)
    extras: dict[str, Any] = {"sampling_scores_TE": PROBS.log().expand(DRAWS, 4)} if sampling else {}
    drawn_TK = draw(1, PROBS, candidates_TE=candidates_TE, **extras)
    found_E = torch.bincount(drawn_TK[:, 0], minlength=4) / DRAWS
    torch.testing.assert_close(found_E, torch.tensor([0, 0.2, 0.6, 0.2]), atol=0.012, rtol=0)


def test_a_token_with_few_candidates_has_fewer_pairs() -> None:
    candidates_TE = torch.tensor([[True] * 4, [False, True, False, False], [False] * 4])
    probs_TE = PROBS * candidates_TE
    pairs = select("sample", make_scored(PROBS.log().expand(3, 4), probs_TE, candidates_TE), k=2)
    assert pairs.token_N.tolist() == [0, 0, 1]
    assert pairs.choice_N.tolist() == [0, 1, 0]
    assert pairs.expert_N[2] == 1


def test_candidates_whose_p_underflows_still_make_up_k() -> None:
    probs_TE = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(50, 4)
    pairs = select("sample", make_scored(probs_TE, probs_TE), k=2)
    expert_TK = pairs.expert_N.reshape(50, 2)
    assert (expert_TK[:, 0] == 0).all() and (expert_TK[:, 1] > 0).all()


def test_draws_follow_their_key() -> None:
    def drawn(context: StepContext, layer: int) -> Tensor:
        probs_TE = torch.full((rows_of(context), 8), 0.125)
        scored = make_scored(probs_TE, probs_TE)
        return select("sample", scored, context, layer=layer, k=2).expert_N.view(-1, 2)

    check_keys(drawn, least=0.5)


def test_evaluation_takes_the_largest() -> None:
    scored = make_scored(PROBS.log()[None], PROBS[None], sampling_scores_TE=torch.tensor([[0.0, 9, 0, 9]]))
    assert select("sample", scored, evaluate=True, k=2).expert_N.tolist() == [0, 2]
    biased = make_scored(PROBS.log()[None], PROBS[None])
    biased.ranking_TE = torch.tensor([[0.0, 2.0, 1.0, -torch.inf]])
    assert select("sample", biased, evaluate=True, k=2).expert_N.tolist() == [1, 2]


def test_what_underflows_is_still_drawn_in_proportion() -> None:
    """Behind a score of 150 all p are 0 in fp32; the second is drawn with odds 1 : 3 : 0."""
    scores_E = torch.tensor([150.0, 0.0, math.log(3.0), -40.0])
    for temperature in (1.0, 0.5):
        score_function = {"name": "softmax", "temperature": temperature}
        router = make_router(4, score_function=score_function, selector={"name": "sample", "k": 2})
        routing = route_scores(router, (temperature * scores_E).expand(DRAWS, 4), StepContext(seed=1))
        drawn_TK = routing.pairs.expert_N.reshape(DRAWS, 2)
        assert not routing.probs_TE[:, 1:].any() and not drawn_TK[:, 0].any()
        found_E = torch.bincount(drawn_TK[:, 1], minlength=4) / DRAWS
        torch.testing.assert_close(found_E, torch.tensor([0, 0.25, 0.75, 0]), atol=0.012, rtol=0)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_a_router_draws_in_proportion_to_its_p(score_function: str) -> None:
    scores_E = torch.tensor([1.0, -0.5, 0.3, 2.0])
    router = make_router(4, score_function=score_function, selector={"name": "sample", "k": 1})
    routing = route_scores(router, scores_E.expand(DRAWS, 4), StepContext(seed=1))
    probs_E = scores_E.sigmoid() if score_function == "sigmoid" else scores_E.softmax(0)
    found_E = torch.bincount(routing.pairs.expert_N, minlength=4) / DRAWS
    torch.testing.assert_close(found_E, probs_E / probs_E.sum(), atol=0.012, rtol=0)
