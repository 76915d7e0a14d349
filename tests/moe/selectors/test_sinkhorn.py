"""sinkhorn: balanced in training, plain top-k in evaluation; against plain iterations."""

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.selectors.sinkhorn import log_column_factors_E
from tests.moe.build import make_part, make_scored


def skewed_scores(num_tokens: int = 64, num_experts: int = 8) -> Tensor:
    """Without balance nearly all go to expert 0."""
    scores_TE = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    scores_TE[:, 0] += 4
    return scores_TE


def plain_plan(scores_TE: Tensor, iterations: int) -> Tensor:
    """The whole matrix, its rows and columns rescaled in turn, in fp64."""
    plan_TE = scores_TE.double().exp()
    for _ in range(iterations):
        plan_TE = plan_TE / plan_TE.sum(1, keepdim=True) / len(plan_TE)
        plan_TE = plan_TE / plan_TE.sum(0, keepdim=True) / plan_TE.shape[1]
    return plan_TE


def test_by_hand() -> None:
    """exp(s) = [[4, 1], [2, 1]]: both prefer expert 0, balanced the second goes to expert 1."""
    scores_TE = torch.tensor([[4.0, 1.0], [2.0, 1.0]]).log()
    selector = make_part("selector", "sinkhorn", num_experts=2, iterations=50)
    scored = make_scored(scores_TE)
    assert selector(scored, StepContext()).expert_N.tolist() == [0, 1]
    torch.testing.assert_close(selector(scored, StepContext()).weight_N, torch.tensor([4 / 5, 1 / 3]))
    # The balanced matrix is [[a, 1/2 - a], [1/2 - a, a]] with a^2 / (1/2 - a)^2 = (4 * 1) / (2 * 1).
    a = 2**0.5 / 2 / (1 + 2**0.5)
    plan_TE = scores_TE.exp() * log_column_factors_E(scores_TE, 50).exp()
    plan_TE = plan_TE / plan_TE.sum(1, keepdim=True) / 2
    torch.testing.assert_close(plan_TE, torch.tensor([[a, 0.5 - a], [0.5 - a, a]]))


@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("k", [1, 2])
def test_against_plain_iterations(iterations: int, k: int) -> None:
    scores_TE = skewed_scores()
    selector = make_part("selector", "sinkhorn", num_experts=8, k=k, iterations=iterations)
    pairs = selector(make_scored(scores_TE), StepContext())
    expected_TK = plain_plan(scores_TE, iterations).topk(k, dim=1).indices
    assert torch.equal(pairs.expert_N.reshape(-1, k), expected_TK)
    assert torch.equal(pairs.weight_N.reshape(-1, k), scores_TE.softmax(-1).gather(1, expected_TK))


def test_training_balances_and_evaluation_does_not() -> None:
    selector = make_part("selector", "sinkhorn", num_experts=8)
    scored = make_scored(skewed_scores())
    assert torch.bincount(selector(scored, StepContext()).expert_N).max() < 20
    expert_N = selector.eval()(scored, StepContext()).expert_N
    assert torch.equal(expert_N, scored.probs_TE.argmax(1))
    assert torch.bincount(expert_N).max() > 50


def test_large_scores_neither_overflow_nor_tie() -> None:
    scores_TE = skewed_scores() * 200
    pairs = make_part("selector", "sinkhorn", num_experts=8, k=3)(make_scored(scores_TE), StepContext())
    assert len(set(zip(pairs.token_N.tolist(), pairs.expert_N.tolist(), strict=True))) == 64 * 3
    assert log_column_factors_E(scores_TE, 10).isfinite().all()


def test_masks_hold() -> None:
    scores_TE = skewed_scores(6, 4)
    candidates_TE = torch.ones(6, 4, dtype=torch.bool)
    candidates_TE[:, 0] = False
    candidates_TE[2] = False
    candidates_TE[3] = torch.tensor([False, False, True, False])
    selector = make_part("selector", "sinkhorn", k=2)
    pairs = selector(make_scored(scores_TE, candidates_TE=candidates_TE), StepContext())
    assert pairs.token_N.tolist() == [0, 0, 1, 1, 3, 4, 4, 5, 5]
    assert candidates_TE[pairs.token_N, pairs.expert_N].all()
