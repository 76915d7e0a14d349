"""`clustering`: by hand, and value and gradient of a plain loop in fp64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.moe.build import assert_alike, loss_of, make_routing

# Clusters (0.4, 0.2) and (0.3, 0.1): variances 0.01, 0.01, means 0.3, 0.2. Then (0.5, 0.5): 0; (0, 0): 0.
PROBS = torch.tensor([[0.4, 0.2, 0.3, 0.1], [0.5, 0.5, 0.0, 0.0]])


def clustering(probs_TE: Tensor, candidates_TE: Tensor | None = None, **options: Any) -> Tensor:
    routing = make_routing([[0]] * len(probs_TE), torch.zeros_like(probs_TE), probs_TE)
    routing.candidates_TE = candidates_TE
    return loss_of("clustering", routing, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (4 * 0.01 + 0) / 2),
        ({"weight": 0.7}, (4 * 0.01 + 0) / 2),  # the layer's, not the part's
        ({"mu": 2.0}, (4 * 0.01 * math.exp(-2 / 3) + 0) / 2),
        ({"mu": 2.0, "form": "difference"}, (4 * (0.01 - 2 / 3) + 4 * (0 - 2)) / 2),
        ({"form": "difference"}, (4 * 0.01 + 0) / 2),
        ({"cluster_size": 4}, 4 * (0.0125 + 0.0625) / 2),
    ],
)
def test_by_hand(options: dict[str, Any], expected: float) -> None:
    assert clustering(PROBS, **{"cluster_size": 2, **options}).item() == pytest.approx(expected)


def test_a_dropped_expert_does_not_count() -> None:
    kept = torch.tensor([[True, True, True, False], [True, False, False, True]])
    probs_TE = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.6, 0.0, 0.0, 0.4]])
    # Token 0: variances 0.01 and 0, means 0.4 and 0.2. Token 1: single experts, no variance; means 0.6, 0.4.
    value = clustering(probs_TE, kept, cluster_size=2, mu=1.0)
    assert value.item() == pytest.approx(4 * 0.005 * math.exp(-1 / 2) / 2)
    difference = clustering(probs_TE, kept, cluster_size=2, mu=1.0, form="difference")
    assert difference.item() == pytest.approx(4 * (0.005 - 1 / 2 + 0 - 1 / 3) / 2)


def test_a_cluster_without_experts_is_none() -> None:
    kept = torch.tensor([[True, True, False, False], [False] * 4])
    probs_TE = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.0] * 4], requires_grad=True)
    value = clustering(probs_TE, kept, cluster_size=2, mu=1.0)
    assert value.item() == pytest.approx(4 * 0.04 * math.exp(-1) / 2)  # the mean over one cluster; max2 = 0
    value.backward()
    assert probs_TE.grad is not None and probs_TE.grad.isfinite().all() and not probs_TE.grad[1].any()


def plain(probs_TE: Tensor, kept_TE: Tensor, size: int, mu: float, form: str) -> Tensor:
    """Token by token, cluster by cluster."""
    values = []
    for row, kept in zip(probs_TE, kept_TE, strict=True):
        clusters = [row[i : i + size][kept[i : i + size]] for i in range(0, len(row), size)]
        clusters = [cluster for cluster in clusters if len(cluster)]
        intra = sum(((c - c.sum() / len(c)) ** 2).sum() / len(c) for c in clusters) / len(clusters)
        means = sorted([c.sum() / len(c) for c in clusters], key=lambda mean: mean.item())
        gap = (means[-1] - means[-2]) / means[-1]
        value = intra - mu * gap if form == "difference" else intra * (-mu * gap).exp()
        values.append(len(row) * value)
    return torch.stack(values).mean()


@pytest.mark.parametrize("form", ["product", "difference"])
@pytest.mark.parametrize("mu", [0.0, 1.5])
@pytest.mark.parametrize("dropped", [False, True])
def test_value_and_gradient_of_the_plain_loop(form: str, mu: float, dropped: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    kept_TE = torch.ones(20, 12, dtype=torch.bool)
    if dropped:
        kept_TE = torch.rand(20, 12, generator=generator) < 0.7
        kept_TE[:, [0, 4]] = True  # two clusters at least
        kept_TE[3, 8:] = False
    scores_TE = torch.randn(20, 12, generator=generator, dtype=torch.float64)

    def probs(scores_TE: Tensor) -> Tensor:
        return scores_TE.masked_fill(~kept_TE, -torch.inf).softmax(1)

    def ours(scores_TE: Tensor) -> Tensor:
        candidates_TE = kept_TE if dropped else None
        return clustering(probs(scores_TE), candidates_TE, cluster_size=4, mu=mu, form=form)

    assert_alike(ours, lambda scores_TE: plain(probs(scores_TE), kept_TE, 4, mu, form), scores_TE)
