"""`balanced`: the best even assignment in training, greedy in evaluation, for any order of the tokens."""

import pytest
import torch

from megamoe.errors import UserError
from megamoe.moe.composition import check_parts
from megamoe.moe.part import StepContext
from tests.moe.build import make_part, make_router, make_scored, moe_config, route_scores

# All like expert 0 best; tokens 0 and 3 lose most by leaving it.
SCORES = torch.tensor([[3.0, 0.0], [2.0, 1.5], [2.0, 1.9], [5.0, 1.0]])


def test_by_hand() -> None:
    selector = make_part("selector", "balanced", num_experts=2)
    pairs = selector(make_scored(SCORES, SCORES.sigmoid()), StepContext())
    assert pairs.token_N.tolist() == [0, 1, 2, 3]
    assert pairs.expert_N.tolist() == [0, 1, 1, 0]
    assert pairs.choice_N.tolist() == [0, 0, 0, 0]
    expected_N = 1 / (1 + (-torch.tensor([3.0, 1.5, 1.9, 5.0])).exp())
    torch.testing.assert_close(pairs.weight_N, expected_N)


def test_evaluation_is_greedy() -> None:
    selector = make_part("selector", "balanced", num_experts=2).eval()
    pairs = selector(make_scored(SCORES, SCORES.sigmoid()), StepContext())
    assert pairs.expert_N.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(pairs.weight_N, SCORES[:, 0].sigmoid())


def test_gradient_is_that_of_the_sigmoid_alone() -> None:
    gradients = []
    for plain in (False, True):
        scores_TE = SCORES.double().requires_grad_()
        if plain:
            weight_N = 1 / (1 + (-scores_TE[torch.arange(4), torch.tensor([0, 1, 1, 0])]).exp())
        else:
            selector = make_part("selector", "balanced", num_experts=2)
            weight_N = selector(make_scored(scores_TE, scores_TE.sigmoid()), StepContext()).weight_N
        (weight_N * torch.tensor([1.0, -2.0, 3.0, 4.0])).sum().backward()
        gradients.append(scores_TE.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_tokens_keep_their_experts_in_any_order_of_the_batch() -> None:
    """Many are alike, so that ties decide: by the place in the data, not in the batch."""
    scores_TE = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    selector = make_part("selector", "balanced")
    straight = selector(make_scored(scores_TE), StepContext(token_index_T=torch.arange(24))).expert_N
    order_T = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    shuffled = selector(make_scored(scores_TE[order_T]), StepContext(token_index_T=order_T)).expert_N
    assert torch.equal(shuffled, straight[order_T])
    assert torch.bincount(straight).tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (
            {"score_function": "softmax"},
            "the score function is 'softmax', expected .* its own score alone, .*score_function: sigmoid.*",
        ),
        (
            {"capacity": "per_expert"},
            "the capacity is 'per_expert', .* drops nothing, .*set capacity: none",
        ),
        (
            {"score_function": {"name": "sigmoid", "bias_update": 0.001}},
            "the score function 'sigmoid' moves the choice by a bias, .*set score_function.bias_update: 0.0",
        ),
        (
            {"masks": [{"name": "gating_dropout", "ranks": 2}]},
            "the mask 'gating_dropout' takes experts away, .*leave the mask out",
        ),
    ],
)
def test_refused_combinations(router: dict[str, object], message: str) -> None:
    config = moe_config(router={"selector": "balanced", "score_function": "sigmoid", **router})
    with pytest.raises(UserError, match=f"^moe.router.selector: balanced: {message}$"):
        check_parts(config, 1)


def test_the_papers_combination_is_accepted() -> None:
    check_parts(moe_config(router={"selector": "balanced", "score_function": "sigmoid"}), 1)


def test_evaluation_takes_the_best_of_scores_whose_p_round_to_1() -> None:
    router = make_router(4, score_function="sigmoid", selector="balanced").eval()
    assert route_scores(router, torch.tensor([[17.0, 18, 20, 19]])).pairs.expert_N.tolist() == [2]
