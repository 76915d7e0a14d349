"""Importance: hand-worked numbers, and the gradient of an independent fp64 formula."""

import pytest
import torch
from torch import Tensor

from tests.support.moe.build import (
    assert_alike,
    gradient_of,
    loss_of,
    make_pairs,
    make_routing,
    make_scored,
    routed,
    select,
)


@pytest.mark.parametrize(
    ("experts", "weights", "expected"),
    [
        # Sums 1.0, 0.6, 0.4, 0: mean 0.5, variance (0.25 + 0.01 + 0.01 + 0.25) / 4 = 0.13, over 0.25.
        ([[0, 1], [2, 0]], [[0.4, 0.6], [0.4, 0.6]], 0.52),
        ([[0, 1], [2, 3]], [[0.5, 0.5], [0.5, 0.5]], 0),  # perfect balance
        ([[0], [0], [0]], [[0.2], [0.3], [0.5]], 3),  # the worst
        ([[1, 1], [0], [2], [3]], [[0.5, 0.25], [0.75], [0.75], [0.75]], 0),  # an expert named twice
    ],
)
def test_importance_by_hand(experts: list[list[int]], weights: list[list[float]], expected: float) -> None:
    scored = make_scored(torch.zeros(len(experts), 4))
    found = loss_of("importance", routed(scored, make_pairs(experts, weights)))
    assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-12)


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
