"""The auction against scipy's exact solver: optimal totals, even loads, hard and degenerate problems."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from megamoe.moe.selectors.balanced import balanced_assignment

SIZES = [(64, 8), (61, 8), (48, 16), (9, 16), (40, 2), (7, 3)]


def random_scores(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))


def best_total(scores_TE: Tensor) -> float:
    """Every expert as floor(T / E) columns and, where T does not divide, one more that a blank may take."""
    num_tokens, num_experts = scores_TE.shape
    least, left = divmod(num_tokens, num_experts)
    scores = scores_TE.double().numpy()
    if left == 0:
        value = np.tile(scores, (1, least))
    else:
        value = np.tile(scores, (1, least + 1))
        blanks = np.zeros((num_experts - left, value.shape[1]))
        blanks[:, : least * num_experts] = -1e9
        value = np.concatenate([value, blanks])
    row, column = linear_sum_assignment(value, maximize=True)
    return float(value[row, column].sum())


def assert_optimal_and_even(scores_TE: Tensor) -> None:
    num_tokens, num_experts = scores_TE.shape
    expert_T = balanced_assignment(scores_TE)
    counts_E = torch.bincount(expert_T, minlength=num_experts)
    assert counts_E.min() >= num_tokens // num_experts
    assert counts_E.max() <= -(-num_tokens // num_experts)
    total, best = scores_TE.double().gather(1, expert_T[:, None]).sum().item(), best_total(scores_TE)
    slack = 1e-6 * num_tokens * (scores_TE.max() - scores_TE.min()).item()
    assert total == pytest.approx(best, rel=1e-4, abs=slack)


def test_by_hand() -> None:
    """Both tokens like expert 0; the one that loses less by leaving does."""
    assert balanced_assignment(torch.tensor([[3.0, 0.0], [2.0, 1.5]])).tolist() == [0, 1]
    assert balanced_assignment(torch.tensor([[3.0, 2.9], [2.0, 1.0], [2.0, 1.0]])).tolist() == [1, 0, 0]


def test_against_every_assignment_there_is() -> None:
    for seed in range(5):
        scores_TE = random_scores(6, 3, seed)
        totals = [
            sum(scores_TE[token, expert].item() for token, expert in enumerate(experts))
            for experts in set(itertools.permutations([0, 0, 1, 1, 2, 2]))
        ]
        found = scores_TE.gather(1, balanced_assignment(scores_TE)[:, None]).sum().item()
        assert found == pytest.approx(max(totals), rel=1e-4)


@pytest.mark.parametrize(("num_tokens", "num_experts"), SIZES)
@pytest.mark.parametrize("kind", ["normal", "one expert liked", "large", "close together", "negative"])
def test_random_problems(num_tokens: int, num_experts: int, kind: str) -> None:
    scores_TE = random_scores(num_tokens, num_experts)
    if kind == "one expert liked":
        scores_TE[:, 0] += 5
    scale, shift = {"large": (1e4, 0), "close together": (1e-3, 3), "negative": (1, -50)}.get(kind, (1, 0))
    assert_optimal_and_even(scores_TE * scale + shift)


@pytest.mark.parametrize(("num_tokens", "num_experts"), SIZES)
@pytest.mark.parametrize("kind", ["all equal", "all for one", "one-hot", "two camps", "rows alike"])
def test_degenerate_problems(num_tokens: int, num_experts: int, kind: str) -> None:
    scores_TE = torch.zeros(num_tokens, num_experts)
    if kind == "all for one":
        scores_TE[:, 1] = 1.0
    elif kind == "one-hot":
        scores_TE[torch.arange(num_tokens), torch.arange(num_tokens) ** 2 % num_experts] = 1.0
    elif kind == "two camps":
        scores_TE[:, : num_experts // 2] = 100.0
        scores_TE += random_scores(num_tokens, num_experts)
    elif kind == "rows alike":
        scores_TE += random_scores(1, num_experts)
    assert_optimal_and_even(scores_TE)


def test_one_expert_or_no_token() -> None:
    assert balanced_assignment(torch.tensor([[1.0], [2.0]])).tolist() == [0, 0]
    assert balanced_assignment(torch.zeros(0, 4)).tolist() == []


def test_scores_that_are_not_finite_terminate() -> None:
    scores_TE = random_scores(16, 4)
    scores_TE[3] = torch.nan
    scores_TE[5, 1] = torch.inf
    assert torch.bincount(balanced_assignment(scores_TE)).tolist() == [4, 4, 4, 4]
