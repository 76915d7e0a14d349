"""Importance: hand-worked numbers, and the gradient of an independent fp64 formula."""

import statistics

import pytest
import torch
from torch import Tensor

from tests.support.moe.build import (
    assert_alike,
    gradient_of,
    loss_of,
    make_hidden,
    make_pairs,
    make_routing,
    make_scored,
    routed,
    select,
    train_on,
)


def value(experts: list[list[int]], weights: list[list[float]], num_experts: int = 4) -> float:
    scored = make_scored(torch.zeros(len(experts), num_experts))
    return float(loss_of("importance", routed(scored, make_pairs(experts, weights))))


def test_importance_by_hand() -> None:
    # Sums 1.0, 0.6, 0.4, 0: mean 0.5, variance (0.25 + 0.01 + 0.01 + 0.25) / 4 = 0.13, over 0.25.
    assert value([[0, 1], [2, 0]], [[0.4, 0.6], [0.4, 0.6]]) == pytest.approx(0.52)


def test_importance_is_0_at_perfect_balance_and_e_minus_1_at_worst() -> None:
    assert value([[0, 1], [2, 3]], [[0.5, 0.5], [0.5, 0.5]]) == 0
    assert value([[0], [0], [0]], [[0.2], [0.3], [0.5]]) == pytest.approx(3)


def test_it_sums_the_weights_and_does_not_count_the_pairs() -> None:
    assert value(
        [[0, 1], [0, 1], [0, 2], [3, 0]], [[0.2, 0.8], [0.3, 0.7], [0.5, 1.0], [1.0, 0.0]]
    ) == pytest.approx(statistics.pvariance([1.0, 1.5, 1.0, 1.0]) / 1.125**2)


def test_an_expert_that_a_token_names_twice_counts_twice() -> None:
    assert value([[1, 1]], [[0.5, 0.25]], 2) == pytest.approx(1)
    assert value([[1, 1], [0]], [[0.5, 0.25], [0.75]], 2) == pytest.approx(0, abs=1e-12)


def test_gradient_of_the_plain_formula_through_softmax_of_the_kept() -> None:
    def ours(scores_TE: Tensor) -> Tensor:
        scored = make_scored(scores_TE)
        return loss_of("importance", routed(scored, select("top_k", scored, k=2, weights="kept_softmax")))

    def plain(scores_TE: Tensor) -> Tensor:
        rank_TE = scores_TE.argsort(dim=1, descending=True).argsort(dim=1)
        gate_TE = scores_TE.exp() * (rank_TE < 2)  # Softmax(KeepTopK)
        sums_E = (gate_TE / gate_TE.sum(1, keepdim=True)).sum(0)
        return (sums_E**2).mean() / sums_E.mean() ** 2 - 1

    generator = torch.Generator().manual_seed(1)
    assert_alike(ours, plain, torch.randn(7, 5, generator=generator, dtype=torch.float64))


def test_without_weights_it_is_0_with_a_finite_gradient() -> None:
    routing = make_routing([[0], [1]], torch.zeros(2, 4), torch.zeros(2, 4))
    routing.wanted.weight_N = torch.zeros(2, requires_grad=True)
    loss = loss_of("importance", routing)
    loss.backward()
    assert loss == 0 and gradient_of(routing.wanted.weight_N).isfinite().all()


def test_in_a_layer_it_balances_the_scorer() -> None:
    values = train_on("importance", {"num_experts": 4}, make_hidden(64, skewed=True), lr=0.5)
    assert values[-1] < 0.2 * values[0]
