"""Importance: hand-worked numbers, and the gradient of an independent fp64 formula."""

import statistics

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from tests.moe.build import (
    gradient_of,
    losses_of,
    make_hidden,
    make_layer,
    make_pairs,
    make_part,
    make_routing,
    make_scored,
    moe_config,
)


def value(experts: list[list[int]], weights: list[list[float]], num_experts: int = 4) -> float:
    zeros_TE = torch.zeros(len(experts), num_experts)
    pairs = make_pairs(experts, weights)
    routing = Routing(**vars(make_scored(zeros_TE)), wanted=pairs, pairs=pairs)
    return float(make_part("loss", "importance", num_experts)(routing, StepContext()))


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
    def routed(scores_TE: Tensor) -> Routing:
        selector = make_part("selector", "top_k", 5, k=2, weights="kept_softmax")
        scored = make_scored(scores_TE)
        pairs = selector(scored, StepContext())
        return Routing(**vars(scored), wanted=pairs, pairs=pairs)

    scores_TE = torch.randn(
        7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True
    )
    loss = make_part("loss", "importance", 5)(routed(scores_TE), StepContext())
    loss.backward()

    plain_TE = scores_TE.detach().clone().requires_grad_()
    rank_TE = plain_TE.argsort(dim=1, descending=True).argsort(dim=1)
    score_function_TE = plain_TE.exp() * (rank_TE < 2)  # Softmax(KeepTopK)
    score_function_TE = score_function_TE / score_function_TE.sum(1, keepdim=True)
    sums_E = score_function_TE.sum(0)
    plain = (sums_E**2).mean() / sums_E.mean() ** 2 - 1
    plain.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(scores_TE.grad, plain_TE.grad)


def test_without_tokens_or_weights_it_is_0_with_a_finite_gradient() -> None:
    assert (
        make_part("loss", "importance")(make_routing([], torch.zeros(0, 4), torch.zeros(0, 4)), StepContext())
        == 0
    )
    routing = make_routing([[0], [1]], torch.zeros(2, 4), torch.zeros(2, 4))
    routing.wanted.weight_N = torch.zeros(2, requires_grad=True)
    loss = make_part("loss", "importance")(routing, StepContext())
    loss.backward()
    assert loss == 0 and gradient_of(routing.wanted.weight_N).isfinite().all()


def test_in_a_layer_it_balances_the_scorer() -> None:
    config = moe_config(num_experts=4, losses={"importance": 1.0})
    layer = make_layer(config)
    optimizer = torch.optim.SGD(layer.router.parameters(), lr=0.5)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        (layer(make_hidden(64, skewed=True)) * 0).sum().backward()
        optimizer.step()
        values.append(losses_of(layer)["importance"].item())
    assert values[-1] < 0.2 * values[0]
