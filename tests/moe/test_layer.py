"""The whole layer against the plain token-by-token loop: outputs, every gradient, losses, counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config.schema import Activation, MoEConfig
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.objective import Objective
from megamoe.moe.part import StepContext
from megamoe.moe.recompute import recomputed
from megamoe.moe.routing import Routing
from tests.support.moe.build import FFN, HIDDEN, gradient_of, make_hidden, make_layer, moe_config, observed
from tests.support.moe.plain import PlainResult, plain_layer

LOSSES = {"switch_balance": 0.3, "z_loss": 0.05}
TOP_1 = {"k": 1, "weights": "raw"}
DROPPING = {"name": "per_expert", "factor": 0.75, "min_capacity": 0}

CASES: dict[str, dict[str, Any]] = {
    "top-1 of 8": {"num_experts": 8, "router": {"selector": TOP_1}},
    "top-2 of 8, gelu": {"num_experts": 8, "activation": "gelu"},
    "relu": {"activation": "relu", "num_shared_experts": 1},
    "geglu": {"activation": "geglu", "num_shared_experts": 1},
    "reglu": {"activation": "reglu", "expert_sublayers": 2},
    "top-8 of 8": {"num_experts": 8, "router": {"selector": {"k": 8, "weights": "raw", "scale": 2.5}}},
    "top-8 of 16": {"num_experts": 16, "router": {"selector": {"k": 8, "weights": "kept_softmax"}}},
    "top-1 of 16": {"num_experts": 16, "router": {"selector": TOP_1, "score_function": "sigmoid"}},
    "weights one": {"num_experts": 8, "router": {"selector": {"k": 2, "weights": "one"}}},
    "sigmoid": {"num_experts": 8, "router": {"score_function": "sigmoid", "selector": {"k": 3}}},
    "uneven": {"num_experts": 8, "router": {"selector": {"k": 2}}, "skewed": True},
    "drops": {"num_experts": 8, "router": {"capacity": DROPPING}},
    "uneven drops": {"num_experts": 8, "router": {"capacity": DROPPING, "selector": TOP_1}, "skewed": True},
    "shared": {"num_experts": 4, "num_shared_experts": 2},
    "gated shared": {"num_experts": 4, "num_shared_experts": 1, "shared_expert_mode": "gated"},
    "residual": {"num_experts": 4, "num_shared_experts": 1, "shared_expert_mode": "residual"},
    "sub-layers": {"num_experts": 4, "expert_sublayers": 2},
    "sub-layers with layernorm": {"num_experts": 4, "expert_sublayers": 3, "norm": "layernorm"},
    "sub-layers, drops": {"num_experts": 4, "expert_sublayers": 2, "router": {"capacity": DROPPING}},
}


def build(case: dict[str, Any], context: StepContext) -> tuple[MoELayer, MoEConfig, Tensor, Activation]:
    tree = dict(case)
    skewed, activation = tree.pop("skewed", False), tree.pop("activation", "swiglu")
    norm = tree.pop("norm", "rmsnorm")
    config = moe_config(**tree, losses=LOSSES)
    shape = LayerShape(HIDDEN, FFN, 1, activation, init_std=0.4, output_std=0.4, seed=1, norm=norm)
    layer = MoELayer(config, shape, context)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if skewed:
            layer.get_parameter("router.scorer.weight")[3, 0] = 2.0
        for name, parameter in layer.named_parameters():  # what starts at 0 or 1
            if name.startswith(("shared.gate", "shared.mix_bias", "experts.norms")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    return layer, config, make_hidden(24, skewed=skewed), activation


def gradients_of_plain(
    layer: MoELayer, config: MoEConfig, hidden_TH: Tensor, activation: Activation, aux_scale: float
) -> tuple[PlainResult, dict[str, Tensor]]:
    weights = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    hidden = hidden_TH.double().requires_grad_()
    plain = plain_layer(weights, hidden, config, activation)
    auxiliary = sum(LOSSES[name] * value for name, value in plain.losses.items())
    objective = (plain.output_TH * direction(hidden)).sum() + aux_scale * auxiliary
    inputs = {"hidden": hidden, **weights}
    gradients = torch.autograd.grad(objective, list(inputs.values()), materialize_grads=True)
    return plain, dict(zip(inputs, gradients, strict=True))


def gradients_of_layer(
    layer: MoELayer, hidden_TH: Tensor, again: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """again: whether the backward pass computes the layer again."""
    hidden = hidden_TH.clone().requires_grad_()
    layer.zero_grad()
    output_TH = recomputed(layer, [layer], hidden) if again else layer(hidden)
    (output_TH * direction(hidden)).sum().backward()
    gradients = {name: gradient_of(parameter) for name, parameter in layer.named_parameters()}
    return output_TH.detach(), {"hidden": gradient_of(hidden), **gradients}


def direction(like: Tensor) -> Tensor:
    """A fixed gradient of the output, so that no error cancels in a sum."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_layer_equals_the_plain_loop_with_every_gradient(case: dict[str, Any]) -> None:
    layer, config, hidden_TH, activation = build(case, StepContext(aux_scale=0.7))
    plain, expected = gradients_of_plain(layer, config, hidden_TH, activation, aux_scale=0.7)
    output_TH, gradients = gradients_of_layer(layer, hidden_TH)
    torch.testing.assert_close(output_TH.double(), plain.output_TH, rtol=1e-4, atol=2e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-4, msg=name)
    observation = observed(layer)
    assert observation.load_E.tolist() == plain.load
    assert observation.wanted_E.tolist() == plain.wanted
    for name, value in plain.losses.items():
        assert not observation.losses[name].requires_grad
        torch.testing.assert_close(observation.losses[name].double(), value.detach(), rtol=1e-5, atol=0)


def test_the_uneven_cases_are_uneven() -> None:
    layer, _, hidden_TH, _ = build(CASES["uneven drops"], StepContext())
    layer(hidden_TH)
    assert observed(layer).wanted_E[3] > 20
    assert observed(layer).load_E[3] == 3  # ceil(0.75 * 1 * 24 / 8)


def noted(function: Callable[..., Any], name: str, order: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        order.append(name)
        return function(*args)

    return call


def test_shared_experts_are_computed_while_the_rows_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(moe_config(num_experts=4, num_shared_experts=1, router={"selector": TOP_1}))
    assert layer.shared is not None
    order: list[str] = []
    layer.shared.register_forward_hook(lambda *_: order.append("shared"))
    layer.experts.register_forward_hook(lambda *_: order.append("routed"))
    for name in ("start", "finish", "combine"):
        monkeypatch.setattr(layer.dispatcher, name, noted(getattr(layer.dispatcher, name), name, order))
    layer(make_hidden(5))
    assert order == ["start", "shared", "finish", "routed", "combine"]


@pytest.mark.parametrize("num_shared", [0, 1])
def test_a_token_without_a_place_gets_only_the_shared_experts(num_shared: int) -> None:
    capacity = {"name": "per_expert", "factor": 0.01, "min_capacity": 0}
    config = moe_config(
        num_experts=4, num_shared_experts=num_shared, router={"capacity": capacity, "selector": TOP_1}
    )
    layer = make_layer(config)
    hidden_TH = make_hidden(1).expand(5, -1)
    output_TH = layer(hidden_TH)
    expected_TH = torch.zeros_like(output_TH)
    if layer.shared is not None:
        expected_TH = layer.shared.join(hidden_TH, layer.shared(hidden_TH), expected_TH)
    assert not torch.equal(output_TH[0], expected_TH[0])
    assert torch.equal(output_TH[1:], expected_TH[1:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_shared_experts": 1},
        {"num_shared_experts": 1, "shared_expert_mode": "residual"},
        {"expert_sublayers": 2},
        {"expert_output_dropout": 0.5, "expert_activation_dropout": 0.5},
    ],
    ids=str,
)
def test_no_tokens_at_all(options: dict[str, Any]) -> None:
    layer = make_layer(moe_config(num_experts=4, losses=LOSSES, **options))
    output_TH, gradients = gradients_of_layer(layer, make_hidden(0))
    assert output_TH.shape == (0, 16)
    assert all(gradient is None or not gradient.any() for gradient in gradients.values())
    assert observed(layer).load_E.tolist() == [0, 0, 0, 0]
    values = {name: value.item() for name, value in observed(layer).losses.items()}
    assert values == dict.fromkeys(LOSSES, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"num_shared_experts": 1},
        {"num_shared_experts": 1, "shared_expert_mode": "residual"},
        {"expert_sublayers": 2},
        {"expert_output_dropout": 0.25, "expert_activation_dropout": 0.25},
    ],
    ids=str,
)
def test_bf16_is_close_to_fp32_and_routes_alike(options: dict[str, Any]) -> None:
    config = moe_config(num_experts=8, losses=LOSSES, **options)
    layer = make_layer(config).bfloat16()
    hidden_TH = make_hidden(64).bfloat16()
    reference = make_layer(config)
    reference.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    output_TH, gradients = gradients_of_layer(layer, hidden_TH)
    expected_TH, expected = gradients_of_layer(reference, hidden_TH.float())
    assert output_TH.dtype == torch.bfloat16
    assert torch.equal(observed(layer).load_E, observed(reference).load_E)
    for name, value in {"output": output_TH, **gradients}.items():
        right = expected_TH if name == "output" else expected[name]
        assert (value.float() - right).norm() < 0.02 * right.norm(), name


def test_evaluation_attaches_no_loss_but_still_observes() -> None:
    layer = make_layer(moe_config(num_experts=4, losses=LOSSES)).eval()
    without = make_layer(moe_config(num_experts=4)).eval()
    _, gradients = gradients_of_layer(layer, make_hidden(12))
    _, expected = gradients_of_layer(without, make_hidden(12))
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert observed(layer).losses.keys() == LOSSES.keys()


def test_the_scale_is_read_when_the_gradient_flows() -> None:
    context = StepContext(aux_scale=1.0)
    layer = make_layer(moe_config(num_experts=4, losses={"z_loss": 1.0}), context)
    gradients = []
    for scale in (0.0, 1.0, 3.0):
        layer.zero_grad()
        output_TH = layer(make_hidden(8))
        context.aux_scale = scale
        output_TH.sum().backward()
        gradients.append(gradient_of(layer.router.scorer.weight).clone())
    torch.testing.assert_close(gradients[2] - gradients[0], 3 * (gradients[1] - gradients[0]))
    assert (gradients[1] - gradients[0]).norm() > 1e-3


def test_recomputation_changes_nothing() -> None:
    router = {"scorer": {"jitter": 0.3}, "capacity": DROPPING}
    dropout = {"expert_output_dropout": 0.3, "expert_activation_dropout": 0.3}
    config = moe_config(num_experts=4, num_shared_experts=1, router=router, losses=LOSSES, **dropout)
    layer = make_layer(config, StepContext(seed=3, step=7, aux_scale=0.5))
    expected_TH, expected = gradients_of_layer(layer, make_hidden(16))
    seen = observed(layer)
    output_TH, gradients = gradients_of_layer(layer, make_hidden(16), again=True)
    assert torch.equal(output_TH, expected_TH)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert torch.equal(seen.load_E, observed(layer).load_E)
    assert torch.equal(seen.wanted_E, observed(layer).wanted_E)
    assert seen.losses == observed(layer).losses


class Total(Objective):
    """A toy: the sum of the token losses, times the mean score."""

    def forward(self, routing: Routing, context: StepContext, token_losses_T: Tensor) -> Tensor:
        return token_losses_T.sum() * routing.scores_TE.mean()


def test_recomputation_does_not_change_the_observation() -> None:
    layer = make_layer(moe_config(num_experts=4, losses=LOSSES))
    layer.losses["total"] = layer.losses.objectives["total"] = Total(Objective.Config(), layer.router.dims)
    layer.losses.weights["total"] = 1.0
    layer(make_hidden(8))
    routing, seen = layer.routing, layer.observation
    layer.recomputing = True
    layer(make_hidden(8))
    assert layer.routing is routing and routing is not None
    layer.objective(torch.ones(8))
    layer(make_hidden(8))
    assert layer.routing is None
    assert layer.observation is seen and seen is not None
    assert seen.losses.keys() == {*LOSSES, "total"}
    layer.recomputing = False
    layer(make_hidden(8))
    assert layer.observation is not seen
