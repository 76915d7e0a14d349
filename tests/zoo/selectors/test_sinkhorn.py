"""sinkhorn: balanced in training, plain top-k in evaluation; against plain iterations."""

import pytest
import torch
from torch import Tensor

from megamoe.zoo.selectors.sinkhorn import log_column_factors_E
from tests.support.moe.build import make_scored, select


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
    pairs = select("sinkhorn", make_scored(scores_TE), iterations=50)
    assert pairs.expert_N.tolist() == [0, 1]
    torch.testing.assert_close(pairs.weight_N, torch.tensor([4 / 5, 1 / 3]))
    # The balanced matrix is [[a, 1/2 - a], [1/2 - a, a]] with a^2 / (1/2 - a)^2 = (4 * 1) / (2 * 1).
    a = 2**0.5 / 2 / (1 + 2**0.5)
    plan_TE = scores_TE.exp() * log_column_factors_E(scores_TE, 50).exp()
    plan_TE = plan_TE / plan_TE.sum(1, keepdim=True) / 2
    torch.testing.assert_close(plan_TE, torch.tensor([[a, 0.5 - a], [0.5 - a, a]]))


@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("k", [1, 2])
def test_against_plain_iterations(iterations: int, k: int) -> None:
    scores_TE = skewed_scores()
    pairs = select("sinkhorn", make_scored(scores_TE), k=k, iterations=iterations)
    expected_TK = plain_plan(scores_TE, iterations).topk(k, dim=1).indices
    assert torch.equal(pairs.expert_N.reshape(-1, k), expected_TK)
    assert torch.equal(pairs.weight_N.reshape(-1, k), scores_TE.softmax(-1).gather(1, expected_TK))


def test_training_balances_and_evaluation_does_not() -> None:
    scored = make_scored(skewed_scores())
    assert torch.bincount(select("sinkhorn", scored).expert_N).max() < 20
    expert_N = select("sinkhorn", scored, evaluate=True).expert_N
    assert torch.equal(expert_N, scored.probs_TE.argmax(1))
    assert torch.bincount(expert_N).max() > 50


def test_large_scores_neither_overflow_nor_tie() -> None:
    scores_TE = skewed_scores() * 200
    pairs = select("sinkhorn", make_scored(scores_TE), k=3)
    assert len(set(zip(pairs.token_N.tolist(), pairs.expert_N.tolist(), strict=True))) == 64 * 3
    assert log_column_factors_E(scores_TE, 10).isfinite().all()


def test_masks_hold() -> None:
    scores_TE = skewed_scores(6, 4)
    candidates_TE = torch.ones(6, 4, dtype=torch.bool)
    candidates_TE[:, 0] = False
    candidates_TE[2] = False
    candidates_TE[3] = torch.tensor([False, False, True, False])
    pairs = select("sinkhorn", make_scored(scores_TE, candidates_TE=candidates_TE), k=2)
    assert pairs.token_N.tolist() == [0, 0, 1, 1, 3, 4, 4, 5, 5]
    assert candidates_TE[pairs.token_N, pairs.expert_N].all()
