"""Weights inside the experts (`moe.weights_in_activation`): outputs, gradients, and what is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config import parse_config
from megamoe.errors import UserError
from megamoe.kernels.choice import Kernels
from megamoe.moe.dispatch.dispatcher import LocalDispatch
from megamoe.validation.run import validate
from tests.support.kernels.drawn import assert_close_to
from tests.support.moe.build import make_hidden, make_layer, moe_config

TOP_2 = {"selector": {"name": "top_k", "k": 2}, "score_function": "sigmoid"}
KERNELS = {"compiled": Kernels(), "plain": Kernels(compiled=False)}


def outcome(inside: bool, activation: Any, kernels: Kernels, dtype: torch.dtype, **moe: Any) -> list[Tensor]:
    """Output and gradients of a layer."""
    config = moe_config(router=TOP_2, num_experts=8, weights_in_activation=inside, **moe)
    layer = make_layer(config, activation=activation, kernels=kernels)
    layer.experts.to(dtype)
    hidden_TH = make_hidden(40).to(dtype).requires_grad_()
    output_TH = layer(hidden_TH)
    (output_TH.float() ** 2).sum().backward()
    assert hidden_TH.grad is not None
    grads = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    assert len(grads) >= 3  # the router's too
    return [output_TH.detach(), hidden_TH.grad, *grads]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu", "swiglu_clamped"])
def test_it_is_the_weighted_sum_of_the_outputs(activation: str, kernels: str) -> None:
    given = activation, KERNELS[kernels], torch.float32
    for inside, outside in zip(outcome(True, *given), outcome(False, *given), strict=True):
        assert_close_to(inside, outside.double(), 1e-5)


@pytest.mark.parametrize(
    "moe",
    [
        {"expert_activation_dropout": 0.2, "expert_output_dropout": 0.1},
        {"num_shared_experts": 1, "shared_expert_mode": "gated"},
        {"latent_size": 8},
        {"zero_experts": {"identity": 2}},
    ],
    ids=["dropout", "shared", "latent", "zero"],
)
def test_beside_other_parts(moe: dict[str, Any]) -> None:
    given = "swiglu", Kernels(), torch.float32
    for inside, outside in zip(outcome(True, *given, **moe), outcome(False, *given, **moe), strict=True):
        assert_close_to(inside, outside.double(), 1e-5)


def test_rows_that_are_filled_up_in_bf16() -> None:
    """The counts of bf16's products on the CPU are multiples of 64."""
    given = "swiglu", Kernels(compiled=False), torch.bfloat16
    for inside, outside in zip(outcome(True, *given), outcome(False, *given), strict=True):
        scale = float(outside.float().abs().max())
        assert float((inside.float() - outside.float()).abs().max()) < 0.04 * scale


def saved_outputs(inside: bool) -> int:
    """How many tensors of the outputs' shape, [pairs, H], the graph keeps, beside the experts' inputs."""
    layer = make_layer(moe_config(router=TOP_2, num_experts=8, weights_in_activation=inside))
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) == (80, 16):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(make_hidden(40).requires_grad_())
    return len(kept) - 1


def test_the_experts_outputs_are_not_kept() -> None:
    assert saved_outputs(inside=False) == 1
    assert saved_outputs(inside=True) == 0


@pytest.mark.parametrize("tree", [{"expert_bias": True}, {"expert_sublayers": 2}])
def test_experts_that_are_no_multiple_are_refused(tree: dict[str, Any]) -> None:
    config = parse_config({"moe": {"layers": {"every": 1}, "weights_in_activation": True, **tree}})
    assert any(problem.key == "moe.weights_in_activation" for problem in validate(config, 1, None))


def test_an_exchange_without_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalDispatch, "sends_weights", False)
    with pytest.raises(UserError, match=r"moe\.weights_in_activation"):
        make_layer(moe_config(weights_in_activation=True))
