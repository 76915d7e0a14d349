"""threshold: as many experts as it takes, by hand and against the paper's loop; its two ends; evaluation."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.routing import Scored
from tests.support.moe.build import make_router, make_scored, route_scores, select

PROBS = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.95, 0.01, 0.02, 0.02], [0.25, 0.45, 0.2, 0.1]])


route = partial(select, "threshold")


def scored_by(probs_TE: Tensor) -> Scored:
    return make_scored(probs_TE.log(), probs_TE)


def algorithm_1(probs: list[float], threshold: float) -> list[int]:
    """Compute the algorithm of appendix A.1."""
    ranked = sorted(range(len(probs)), key=lambda expert: -probs[expert])
    chosen: list[int] = []
    total = 0.0
    for expert in ranked:
        total += probs[expert]
        chosen.append(expert)
        if total >= threshold:
            break
    return chosen


def test_by_hand() -> None:
    pairs = route(scored_by(PROBS), threshold=0.65)
    assert pairs.token_N.tolist() == [0, 0, 1, 2, 2]
    assert pairs.expert_N.tolist() == [3, 2, 0, 1, 0]
    assert pairs.choice_N.tolist() == [0, 1, 0, 0, 1]
    torch.testing.assert_close(pairs.weight_N, torch.tensor([0.4, 0.3, 0.95, 0.45, 0.25]))


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 0.6, 0.9, 0.99])
def test_against_the_papers_loop(threshold: float) -> None:
    probs_TE = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    pairs = route(scored_by(probs_TE), threshold=threshold)
    for token in range(50):
        found = pairs.expert_N[pairs.token_N == token].tolist()
        assert found == algorithm_1(probs_TE[token].tolist(), threshold)


def test_the_two_ends() -> None:
    """t = 1 sends to all, though two values reach 1 by themselves in fp32."""
    probs_TE = torch.tensor([[1.0, 1e-12, 1e-13], [0.3, 0.3, 0.4]])
    assert route(scored_by(probs_TE), threshold=1.0).token_N.tolist() == [0, 0, 0, 1, 1, 1]
    pairs = route(scored_by(probs_TE), threshold=0.0)
    assert pairs.expert_N.tolist() == [0, 2]
    assert route(scored_by(probs_TE), threshold=0.999).token_N.tolist() == [0, 1, 1, 1]


def test_evaluation_may_have_its_own() -> None:
    options: dict[str, Any] = {"threshold": 0.65, "eval_threshold": 0.0}
    assert len(route(scored_by(PROBS), **options).token_N) == 5
    assert len(route(scored_by(PROBS), evaluate=True, **options).token_N) == 3
    assert len(route(scored_by(PROBS), evaluate=True, threshold=0.65).token_N) == 5


@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
def test_masked_experts_are_never_chosen(threshold: float) -> None:
    candidates_TE = torch.tensor([[True, False, True, False], [False] * 4, [False, False, True, False]])
    probs_TE = torch.tensor([[0.4, 0.0, 0.6, 0.0], [0.0] * 4, [0.0, 0.0, 1.0, 0.0]])
    pairs = route(make_scored(torch.zeros(3, 4), probs_TE, candidates_TE), threshold=threshold)
    expected = [(0, 2), (0, 0), (2, 2)] if threshold > 0 else [(0, 2), (2, 2)]
    assert list(zip(pairs.token_N.tolist(), pairs.expert_N.tolist(), strict=True)) == expected


def test_values_that_do_not_sum_to_1_count_by_their_share() -> None:
    probs_TE = torch.tensor([[0.9, 0.3, 0.6, 0.2]])  # 2 in all
    assert route(scored_by(probs_TE), threshold=0.7).expert_N.tolist() == [0, 2]
    assert route(scored_by(probs_TE), threshold=0.8).expert_N.tolist() == [0, 2, 1]
    assert route(scored_by(probs_TE * 0), threshold=0.8).token_N.tolist() == [0]


def test_a_bias_shifts_the_order_alone() -> None:
    scored = scored_by(torch.tensor([[0.5, 0.3, 0.2, 0.0]]))
    scored.ranking_TE = scored.ranking_TE + torch.tensor([0.0, 1.0, 0.0, 0.0])
    pairs = route(scored, threshold=0.6)
    assert pairs.expert_N.tolist() == [1, 0]
    torch.testing.assert_close(pairs.weight_N, torch.tensor([0.3, 0.5]))


@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_over_all_experts_the_share_is_that_of_the_candidates_sum(threshold: float) -> None:
    scores_TE = torch.randn(50, 16, generator=torch.Generator().manual_seed(3))
    limit = {"name": "group_limit", "num_groups": 4, "keep": 2}
    selector = {"name": "threshold", "threshold": threshold}
    found = []
    for over in ("candidates", "all"):
        score_function = {"name": "softmax", "over": over}
        found.append(
            route_scores(
                make_router(16, masks=[limit], score_function=score_function, selector=selector), scores_TE
            )
        )
    pairs, other = (routing.pairs for routing in found)
    assert torch.equal(pairs.token_N, other.token_N) and torch.equal(pairs.expert_N, other.expert_N)
    torch.testing.assert_close(other.weight_N, scores_TE.softmax(1)[other.token_N, other.expert_N])
    assert (other.weight_N < pairs.weight_N).all()
