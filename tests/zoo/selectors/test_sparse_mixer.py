"""sparse_mixer: draws, weights and gradients, against the softmax that they estimate."""

import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from tests.support.moe.build import gradient_of, make_scored, select

SCORES = torch.tensor([2.0, 1.9, 1.0, -1.0])  # with epsilon 0.1, the bound is 0.2: the first two are near


def test_evaluation_by_hand() -> None:
    """First 2.0 of {2.0, 1.9}; then 1.9, alone near itself."""
    pairs = select("sparse_mixer", make_scored(SCORES[None]), evaluate=True, epsilon=0.1)
    assert pairs.expert_N.tolist() == [0, 1]
    torch.testing.assert_close(pairs.weight_N, torch.tensor([torch.tensor(0.1).sigmoid(), 1.0]))


def drawn(num_tokens: int, scores_TE: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    pairs = select("sparse_mixer", make_scored(scores_TE), StepContext(seed=3), k=k, epsilon=0.1)
    return pairs.expert_N.view(num_tokens, k), pairs.weight_N.view(num_tokens, k)


def test_draws_follow_the_softmax_of_the_near_and_a_quarter_of_the_others_keeps_its_weight() -> None:
    count = 20_000
    expert_T, weight_T = (found[:, 0] for found in drawn(count, SCORES.expand(count, -1)))
    q = torch.tensor(0.1).sigmoid().item()
    assert expert_T.max() == 1
    assert abs((expert_T == 0).float().mean().item() - q) < 4 * 0.5 / count**0.5
    torch.testing.assert_close(weight_T[expert_T == 0], torch.full_like(weight_T[expert_T == 0], q))
    of_second_N = weight_T[expert_T == 1] / (1 - q)
    full_N = of_second_N > 0.9
    torch.testing.assert_close(of_second_N[~full_N], torch.full_like(of_second_N[~full_N], 1 / 3))
    assert abs(full_N.float().mean().item() - 0.25) < 4 * 0.44 / len(full_N) ** 0.5


def test_the_gradient_is_that_of_q() -> None:
    """Of each pair's q by the scores of the near experts: q (delta - q), whatever the factor."""
    scores_TE = SCORES.expand(50, -1).clone().requires_grad_()
    expert_TK, weight_TK = drawn(50, scores_TE)
    weight_TK.sum().backward()
    q_E = torch.tensor([0.1, 0.0]).softmax(0)
    q_T = q_E[expert_TK[:, 0]]
    expected_T2 = q_T[:, None] * (torch.nn.functional.one_hot(expert_TK[:, 0], 2) - q_E)
    torch.testing.assert_close(gradient_of(scores_TE)[:, :2], expected_T2)
    assert not gradient_of(scores_TE)[:, 2:].any() and len(expert_TK.unique()) == 2


def test_choices_are_distinct() -> None:
    expert_TK, _ = drawn(64, torch.zeros(64, 4), k=4)
    assert all(sorted(row) == [0, 1, 2, 3] for row in expert_TK.tolist())
