"""Losses of the experts' outputs and first products: by hand, and against plain formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.moe.layer import MoELayer
from megamoe.moe.part import StepContext
from megamoe.zoo.losses.output_orthogonality import SMALLEST
from tests.support.moe.build import (
    HIDDEN,
    make_hidden,
    make_layer,
    make_pairs,
    make_part,
    moe_config,
    observed,
)

E, TOKENS = 4, 12
SELECTORS: dict[str, dict[str, Any]] = {
    "top_k": {"selector": {"k": 3}},
    "threshold": {"selector": {"name": "threshold", "threshold": 0.6}},
    "capacity": {"selector": {"k": 2}, "capacity": {"name": "per_expert", "factor": 0.75}},
}
ROWS = {"scorer": {"name": "linear", "rows": True}}


def test_orthogonality_by_hand() -> None:
    """Outputs (3, 4) and (0, 2) with product 8: 64 / 4 + 64 / 25; other tokens have one or none."""
    loss = make_part("loss", "output_orthogonality")
    output_NH = torch.tensor([[3.0, 4.0], [0.0, 2.0], [5.0, 5.0]])
    found_T = loss._of_tokens(output_NH, make_pairs([[0, 1], [2], []]), 3)
    assert found_T.tolist() == pytest.approx([16 + 2.56, 0, 0], rel=1e-6)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("latent_size", [None, 8])
def test_orthogonality_of_a_layer_is_the_plain_formula(name: str, latent_size: int | None) -> None:
    """The output of the layer and its gradient stay what they are without the loss."""
    tree = {"num_experts": E, "latent_size": latent_size, "router": SELECTORS[name]}
    layer = make_layer(moe_config(**tree, losses={"output_orthogonality": 1.0}))
    plain = make_layer(moe_config(**tree))
    routing = plain.router(make_hidden(TOKENS), plain.context)
    output_TH, expected_TH = layer(make_hidden(TOKENS)), plain(make_hidden(TOKENS))
    torch.testing.assert_close(output_TH, expected_TH, rtol=1e-5, atol=1e-6)
    values = []
    for token in range(TOKENS):
        chosen = routing.pairs.expert_N[routing.pairs.token_N == token].tolist()
        row_1H = make_hidden(TOKENS)[token : token + 1]
        row_1H = plain.to_latent(row_1H)
        outputs = [plain.experts(row_1H, functional.one_hot(torch.tensor(each), E))[0] for each in chosen]
        squares = [
            (one @ other) ** 2 / (other @ other + SMALLEST)
            for one in outputs
            for other in outputs
            if one is not other
        ]
        values.append(torch.stack(squares).sum() if squares else torch.zeros(()))
    expected = torch.stack(values).mean()
    torch.testing.assert_close(observed(layer).losses["output_orthogonality"], expected.detach())
    output_TH.square().sum().backward()
    (expected_TH.square().sum() + expected).backward()
    same_gradients(layer, plain)


def same_gradients(layer: MoELayer, plain: MoELayer) -> None:
    others = dict(plain.named_parameters())
    for name, weight in layer.named_parameters():
        torch.testing.assert_close(weight.grad, others[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def norms(layer: MoELayer, rows_EH: Tensor, gated: bool) -> Tensor:
    """M of the plain formula."""
    rows_EL = layer.to_latent(rows_EH)
    up_EGL = layer.experts.get_parameter("up")
    gate_EFL = up_EGL.chunk(2, dim=1)[0] if gated else up_EGL
    return torch.einsum("pl,efl->pef", rows_EL, gate_EFL).norm(dim=-1)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("more", [{}, {"latent_size": 8}, {"zero_experts": {"identity": 2}}], ids=str)
def test_coupling_of_a_layer_is_the_plain_formula(activation: Any, more: dict[str, Any]) -> None:
    alpha = 0.8
    tree = {"num_experts": E, "router": ROWS, **more}
    losses = {"expert_router_coupling": {"weight": 1.0, "alpha": alpha}}
    layer = make_layer(moe_config(**tree, losses=losses), activation=activation)
    plain = make_layer(moe_config(**tree), activation=activation)
    layer.losses["expert_router_coupling"].eval()  # no draws
    layer(make_hidden(TOKENS)).square().sum().backward()
    norm_EE = norms(plain, plain.router.get_parameter("scorer.weight")[:E], activation == "swiglu")
    expected = torch.zeros(())
    for i in range(E):
        for j in range(E):
            if i != j:
                for entry in (norm_EE[i, j], norm_EE[j, i]):
                    expected = expected + (entry - alpha * norm_EE[i, i]).clamp_min(0) / E**2
    assert expected > 0
    torch.testing.assert_close(observed(layer).losses["expert_router_coupling"], expected.detach())
    (plain(make_hidden(TOKENS)).square().sum() + expected).backward()
    same_gradients(layer, plain)


def test_coupling_draws_rows_nearer_to_their_own_than_to_others() -> None:
    layer = make_layer(moe_config(num_experts=E, router=ROWS, losses={"expert_router_coupling": 1.0}))
    loss: Any = layer.losses["expert_router_coupling"]
    routing = layer.router(make_hidden(1), layer.context)
    rows_EH = routing.extras["rows_EH"].detach()
    seen = set()
    for step in range(50):
        drawn_EH = loss._rows_EH(routing, StepContext(step=step)).detach()
        assert torch.equal(drawn_EH, loss._rows_EH(routing, StepContext(step=step)))
        change_EH = drawn_EH / rows_EH - 1
        assert (change_EH.abs().amax(1) <= loss._half_width_E(rows_EH) * (1 + 1e-5)).all()
        assert torch.cdist(drawn_EH, rows_EH).argmin(1).tolist() == [*range(E)]
        seen.add(float(drawn_EH[0, 0]))
    assert len(seen) == 50
    first, second = rows_EH[0], rows_EH[1]
    alone = loss._half_width_E(torch.stack((first, second)))
    assert alone.tolist() == pytest.approx(
        [float((first - second).norm() / (2 * row.norm())) for row in (first, second)], rel=1e-5
    )
    assert rows_EH.shape[1] == HIDDEN
