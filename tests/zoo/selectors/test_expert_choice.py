"""expert_choice: even loads, each expert's best tokens, the order of a token's experts, the refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.moe.build import make_router, make_scored, route_scores, select

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.5, 0.4], [0.05, 0.05, 0.9]])


route = partial(select, "expert_choice")


def test_by_hand() -> None:
    """C = ceil(1.5 * 4 / 3) = 2: expert 0 takes the tokens 0 and 1, 1 takes 2 and 1, 2 takes 3 and 2."""
    pairs = route(make_scored(PROBS.log(), PROBS), k=1.5)
    assert pairs.token_N.tolist() == [0, 1, 1, 2, 2, 3]
    assert pairs.expert_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert pairs.choice_N.tolist() == [0, 0, 1, 0, 1, 0]
    torch.testing.assert_close(pairs.weight_N, torch.tensor([0.7, 0.6, 0.3, 0.5, 0.4, 0.9]))


@pytest.mark.parametrize(("k", "slots"), [(1.0, 5), (2.0, 10), (0.5, 3), (8.0, 40)])
def test_against_a_loop_over_experts(k: float, slots: int) -> None:
    probs_TE = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    pairs = route(make_scored(probs_TE.log(), probs_TE), k=k)
    values: list[list[float]] = probs_TE.tolist()
    expected: dict[int, list[int]] = {token: [] for token in range(40)}
    for expert in range(8):
        for token in sorted(range(40), key=lambda token: -values[token][expert])[:slots]:
            expected[token].append(expert)
    for token, experts in expected.items():
        found = pairs.expert_N[pairs.token_N == token].tolist()
        assert found == sorted(experts, key=lambda expert: -values[token][expert])
        assert pairs.choice_N[pairs.token_N == token].tolist() == [*range(len(experts))]


def test_masks_leave_some_experts_short() -> None:
    candidates_TE = torch.ones(4, 3, dtype=torch.bool)
    candidates_TE[:, 0] = torch.tensor([False, False, True, False])
    candidates_TE[:, 1] = False
    probs_TE = PROBS * candidates_TE
    pairs = route(make_scored(PROBS.log(), probs_TE, candidates_TE), k=1.5)
    pairs_set = set(zip(pairs.token_N.tolist(), pairs.expert_N.tolist(), strict=True))
    assert pairs_set == {(2, 0), (2, 2), (3, 2)}


def test_under_step_wide_masks_a_token_has_as_many_experts_as_in_evaluation() -> None:
    """k T pairs in all: of the four open experts twice as many each as of eight."""
    scores_TE = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    dropout = {"name": "expert_dropout", "cluster_size": 4}
    selector = {"name": "expert_choice", "k": 2, "allow_non_causal": True}
    router = make_router(8, selector=selector, masks=[dropout])
    for training, open_experts in ((True, 4), (False, 8)):
        router.train(training)
        counts_E = route_scores(router, scores_TE).wanted_counts_E()
        assert counts_E[counts_E > 0].tolist() == [2 * 12 // open_experts] * open_experts


def choose(scores_TE: Tensor, k: float, **router: Any) -> set[tuple[int, int]]:
    """(token, expert) of a whole router."""
    selector = {"name": "expert_choice", "k": k, "allow_non_causal": True}
    pairs = route_scores(make_router(scores_TE.shape[1], selector=selector, **router), scores_TE).pairs
    return set(zip(pairs.token_N.tolist(), pairs.expert_N.tolist(), strict=True))


def test_with_a_softmax_an_expert_compares_tokens_by_p() -> None:
    """Expert 0's largest score is token 1's, its largest p token 0's. C = 1 of two tokens."""
    scores_TE = torch.tensor([[1.0, -1.0], [3.0, 4.0]])
    assert choose(scores_TE, k=1) == {(0, 0), (1, 1)}
    limited = [{"name": "group_limit", "num_groups": 2, "keep": 1}]
    assert choose(scores_TE, k=1, masks=limited, score_function={"name": "softmax", "over": "all"}) == {
        (0, 0),
        (1, 1),
    }


def test_with_a_sigmoid_an_expert_compares_tokens_by_scores() -> None:
    """Among p that fp32 rounds to 1 the largest score wins; a closed expert takes none."""
    scores_TE = torch.tensor([[18.0, 0.0, 1.0, 0.0], [19.0, 30.0, 0.0, 0.0], [20.0, 0.0, 0.0, 0.0]])
    scores_TE = torch.cat([scores_TE, torch.full((1, 4), -9.0)])
    found = choose(scores_TE, k=1, score_function="sigmoid")
    assert {token for token, expert in found if expert == 0} == {2}
    limit = {"name": "group_limit", "num_groups": 4, "keep": 1}
    assert choose(scores_TE, k=1, score_function="sigmoid", masks=[limit]) >= {(2, 0), (1, 1)}
    assert (1, 0) not in choose(scores_TE, k=2, score_function="sigmoid", masks=[limit])
