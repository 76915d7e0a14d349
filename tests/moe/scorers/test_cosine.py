"""The cosine scorer: hand-worked angles, its gradient against a plain formula, the kept norm."""

import math
from typing import Any

import pytest
import torch

from megamoe.moe.part import StepContext
from tests.support.moe.build import HIDDEN, gradient_of, make_hidden, make_layer, make_part, moe_config

CONTEXT = StepContext()


def test_scores_by_hand() -> None:
    scorer = make_part("scorer", "cosine", num_experts=3, routing_dim=2, temperature=0.5)
    scorer.weight.data.zero_()
    scorer.weight.data[0, 0] = scorer.weight.data[1, 1] = 7.0  # keeps the first two components
    scorer.embedding.data = torch.tensor([[0.1, 0.0], [0.0, -0.2], [0.3, 0.4]])
    hidden_TH = torch.zeros(2, HIDDEN)
    hidden_TH[0, :3] = torch.tensor([3.0, 4.0, 9.0])
    hidden_TH[1, 1] = 0.01
    scores_TE, extras = scorer(hidden_TH, CONTEXT)
    cosine_TE = torch.tensor([[0.6, -0.8, (0.18 + 0.32) / 0.5], [0.0, -1.0, 0.8]])
    torch.testing.assert_close(extras["cosine_TE"], cosine_TE)
    torch.testing.assert_close(scores_TE, cosine_TE / 0.5)


def test_scores_and_gradients_follow_the_plain_formula() -> None:
    scorer, hidden_TH = make_part("scorer", "cosine", num_experts=8), make_hidden(9).requires_grad_()
    upstream_TE = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    scores_TE, _ = scorer(hidden_TH, CONTEXT)
    (scores_TE * upstream_TE).sum().backward()

    w, e = (p.detach().double().requires_grad_() for p in (scorer.weight, scorer.embedding))
    x_TH = hidden_TH.detach().double().requires_grad_()
    tau = scorer.log_temperature.detach()[0].double().exp().requires_grad_()
    rows = [
        torch.stack(
            [(w @ x) @ e_i / ((w @ x).square().sum().sqrt() * e_i.square().sum().sqrt() * tau) for e_i in e]
        )
        for x in x_TH
    ]
    plain_TE = torch.stack(rows)
    (plain_TE * upstream_TE).sum().backward()

    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    assert scores_TE.dtype == torch.float32
    torch.testing.assert_close(scores_TE.double(), plain_TE, **close)
    torch.testing.assert_close(gradient_of(hidden_TH).double(), x_TH.grad, **close)
    torch.testing.assert_close(scorer.weight.grad.double(), w.grad, **close)
    torch.testing.assert_close(scorer.embedding.grad.double(), e.grad, **close)
    # d/d log tau = tau d/d tau
    torch.testing.assert_close(scorer.log_temperature.grad[0].double(), tau.detach() * tau.grad, **close)


@pytest.mark.parametrize(("score_function", "expected"), [("softmax", 0.3), ("sigmoid", 0.07)])
def test_the_temperature_starts_by_the_score_function(score_function: str, expected: float) -> None:
    router = {"scorer": "cosine", "score_function": score_function}
    layer = make_layer(moe_config(num_experts=4, router=router, losses={"cosine_balance": 1.0}))
    tau = layer.get_parameter("router.scorer.log_temperature").exp()
    assert layer.losses["cosine_balance"].temperature == expected
    assert tau.shape == (1,) and tau.item() == pytest.approx(expected)
    assert make_part("scorer", "cosine", temperature=2.0).log_temperature.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("num_experts", "options", "expected"), [(32, {}, 16), (2, {}, 2), (4, {"routing_dim": 5}, 5)]
)
def test_the_routing_dimension(num_experts: int, options: dict[str, Any], expected: int) -> None:
    scorer = make_part("scorer", "cosine", num_experts=num_experts, **options)
    assert scorer.weight.shape == (expected, HIDDEN)
    assert scorer.embedding.shape == (num_experts, expected)


def test_embeddings_start_at_norm_a_tenth_in_every_direction() -> None:
    scorer = make_part("scorer", "cosine", num_experts=64)
    torch.testing.assert_close(scorer.embedding.norm(dim=1), torch.full((64,), 0.1))
    assert scorer.embedding.mean(dim=0).norm() < 0.05
    torch.manual_seed(9)
    assert torch.equal(make_part("scorer", "cosine", num_experts=64).embedding, scorer.embedding)
    assert not torch.equal(make_part("scorer", "cosine", num_experts=64, layer=2).embedding, scorer.embedding)


def test_the_constraint_brings_the_norm_back_and_leaves_the_angle() -> None:
    scorer = make_part("scorer", "cosine", num_experts=8)
    ((parameter, project),) = scorer.constraints()
    assert parameter is scorer.embedding
    moved_ED = scorer.embedding.detach() * torch.arange(1.0, 9.0)[:, None] + 0.01
    kept_ED = project(moved_ED)
    torch.testing.assert_close(kept_ED.norm(dim=1), torch.full((8,), 0.1))
    torch.testing.assert_close(kept_ED / 0.1, moved_ED / moved_ED.norm(dim=1, keepdim=True))
    assert project(torch.zeros(2, 4)).isfinite().all()


def test_a_vector_without_direction_scores_0_and_gets_no_gradient() -> None:
    scorer, hidden_TH = make_part("scorer", "cosine"), make_hidden(3)
    hidden_TH[1] = 0
    hidden_TH.requires_grad_()
    scores_TE, _ = scorer(hidden_TH, CONTEXT)
    scores_TE.sum().backward()
    assert not scores_TE[1].any() and scores_TE[0].any()
    assert not gradient_of(hidden_TH)[1].any() and gradient_of(hidden_TH)[0].any()
    assert all(parameter.grad.isfinite().all() for parameter in scorer.parameters())


def test_without_reduction_by_hand() -> None:
    """Table 3's second row: cosines in the hidden size, with the temperature and the kept norm."""
    scorer = make_part("scorer", "cosine", num_experts=2, reduction=False, temperature=0.5)
    assert {name: tuple(p.shape) for name, p in scorer.named_parameters()} == {
        "embedding": (2, HIDDEN),
        "log_temperature": (1,),
    }
    torch.testing.assert_close(scorer.embedding.norm(dim=1), torch.full((2,), 0.1))
    scorer.embedding.data.zero_()
    scorer.embedding.data[0, 0] = 0.1
    scorer.embedding.data[1, 1:3] = torch.tensor([0.3, -0.4])
    hidden_TH = torch.zeros(1, HIDDEN)
    hidden_TH[0, :3] = torch.tensor([2.0, 1.0, 2.0])
    scores_TE, extras = scorer(hidden_TH, CONTEXT)
    cosine_TE = torch.tensor([[2 / 3, (0.3 - 0.8) / (3 * 0.5)]])
    torch.testing.assert_close(extras["cosine_TE"], cosine_TE)
    torch.testing.assert_close(scores_TE, 2 * cosine_TE)
    ((parameter, project),) = scorer.constraints()
    torch.testing.assert_close(project(parameter.detach()).norm(dim=1), torch.full((2,), 0.1))


def test_without_normalisation_by_hand() -> None:
    """Table 3's third row, s_i = (W x) . e_i: lengths count, on both sides, and no norm is kept."""
    scorer = make_part("scorer", "cosine", num_experts=3, routing_dim=2, normalise=False)
    assert {name: tuple(p.shape) for name, p in scorer.named_parameters()} == {
        "weight": (2, HIDDEN),
        "embedding": (3, 2),
    }
    assert scorer.constraints() == []
    scorer.weight.data.zero_()
    scorer.weight.data[0, 0] = scorer.weight.data[1, 1] = 2.0
    scorer.embedding.data = torch.tensor([[0.1, 0.0], [0.0, -0.2], [0.3, 0.4]])
    hidden_TH = torch.zeros(1, HIDDEN)
    hidden_TH[0, :3] = torch.tensor([3.0, 4.0, 9.0])
    scores_TE, extras = scorer(hidden_TH, CONTEXT)
    torch.testing.assert_close(scores_TE, torch.tensor([[0.6, -1.6, 1.8 + 3.2]]))
    assert extras == {}


def test_without_normalisation_the_embeddings_start_as_any_weight() -> None:
    scorer = make_part(
        "scorer", "cosine", num_experts=64, dims={"init_std": 0.3}, normalise=False, reduction=False
    )
    assert scorer.embedding.std().item() == pytest.approx(0.3, rel=0.1)
    assert scorer.embedding.norm(dim=1).std() > 0.05


def test_without_both_it_is_the_linear_scorer() -> None:
    scorer = make_part("scorer", "cosine", num_experts=8, reduction=False, normalise=False)
    linear, hidden_TH = make_part("scorer", "linear", num_experts=8), make_hidden(5)
    (name, embedding), *others = scorer.named_parameters()
    assert name == "embedding" and not others
    linear.weight.data.copy_(embedding.data)
    assert torch.equal(scorer(hidden_TH, CONTEXT)[0], linear(hidden_TH, CONTEXT))


def test_a_temperature_beside_dot_products_is_learned_where_asked() -> None:
    scorer = make_part("scorer", "cosine", num_experts=4, normalise=False, temperature=0.5)
    plain = make_part("scorer", "cosine", num_experts=4, normalise=False)
    hidden_TH = make_hidden(5)
    scores_TE, _ = scorer(hidden_TH, CONTEXT)
    torch.testing.assert_close(scores_TE, 2 * plain(hidden_TH, CONTEXT)[0])
    scores_TE.square().sum().backward()
    assert scorer.log_temperature.grad.abs().item() > 0


def test_ablations_train_in_a_layer() -> None:
    for options in ({"reduction": False}, {"normalise": False}, {"reduction": False, "normalise": False}):
        router = {"scorer": {"name": "cosine", **options}, "score_function": "sigmoid"}
        layer = make_layer(moe_config(num_experts=4, router=router))
        layer(make_hidden(24)).square().sum().backward()
        gradients = [parameter.grad for parameter in layer.router.parameters()]
        assert all(g is not None and g.isfinite().all() and g.any() for g in gradients)
