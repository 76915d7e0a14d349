"""similarity and score_variance: by hand, and their gradients by formula."""

import pytest
import torch

from tests.support.moe.build import (
    assert_alike,
    gradient_of,
    loss_of,
    make_hidden,
    make_layer,
    make_routing,
    moe_config,
    observed,
)


def test_similarity_by_hand_and_by_formula() -> None:
    """Rows (3, 4) and (0, 2): W W^T is 25, 8; 8, 4. Off the identity by 24 + 8 + 8 + 3."""
    router = {"scorer": {"name": "linear", "rows": True}, "selector": {"k": 1, "weights": "raw"}}
    layer = make_layer(moe_config(num_experts=2, router=router, losses={"similarity": 1.0}))
    weight_EH = layer.router.get_parameter("scorer.weight")
    with torch.no_grad():
        weight_EH.zero_()
        weight_EH[0, :2], weight_EH[1, :2] = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    (layer(make_hidden(5)) * 0).sum().backward()
    assert observed(layer).losses["similarity"].item() == 43
    sign_EE = torch.ones(2, 2)  # of G - I; the gradient is (S + S^T) W
    torch.testing.assert_close(gradient_of(weight_EH), 2 * sign_EE @ weight_EH.detach())


def test_variance_of_all_scores_by_hand_and_by_formula() -> None:
    probs_TE = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    routing = make_routing([[0], [1]], probs_TE, probs_TE)
    assert loss_of("score_variance", routing, over="all").item() == -0.25
    given_TE = torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_alike(
        lambda p_TE: loss_of("score_variance", make_routing([[0]] * 5, p_TE, p_TE), over="all"),
        lambda p_TE: -p_TE.var(dim=0, correction=0).mean(),
        given_TE,
    )


def test_variance_of_the_chosen_scores_by_hand_and_by_formula() -> None:
    """Tokens choose (0, 1), (0, 2) by weights (3/4, 1/4), (1/2, 1/2): columns 1/64, 1/64, 1/16."""
    probs_TE = torch.tensor([[0.6, 0.2, 0.2], [0.25, 0.5, 0.25]])
    routing = make_routing([[0, 1], [0, 2]], probs_TE, probs_TE)
    routing.wanted.weight_N.copy_(torch.tensor([0.75, 0.25, 0.5, 0.5]))
    assert loss_of("score_variance", routing).item() == pytest.approx(-(1 + 1 + 4) / 64 / 3, rel=1e-6)
    layer = make_layer(moe_config(num_experts=4, losses={"score_variance": 1.0}))
    layer(make_hidden(6)).sum().backward()
    found = gradient_of(layer.router.get_parameter("scorer.weight")).clone()
    layer.zero_grad()
    other = make_layer(moe_config(num_experts=4, losses={}))
    hidden_TH = make_hidden(6)
    routing = other.router(hidden_TH, other.context)
    best_TE = routing.probs_TE * torch.zeros_like(routing.probs_TE).scatter(
        1, routing.probs_TE.topk(2).indices, 1.0
    )
    share_TE = best_TE / best_TE.sum(1, keepdim=True)
    (other(hidden_TH).sum() - share_TE.var(dim=0, correction=0).mean()).backward()
    torch.testing.assert_close(found, gradient_of(other.router.get_parameter("scorer.weight")))
