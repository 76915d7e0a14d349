"""A frozen router and frozen experts: no gradient of their own, no learning outside it, yet losses go on."""

import pytest
import torch
from torch import Tensor

from megamoe.moe.layer import MoELayer
from megamoe.moe.part import Constraint, Mask, StepContext
from tests.support.moe.build import make_hidden, make_layer, moe_config

BOTH = ["router", "experts"]


def layer(frozen: list[str]) -> MoELayer:
    losses = {"switch_balance": 0.5, "z_loss": 0.1}
    return make_layer(moe_config(num_experts=4, num_shared_experts=1, losses=losses, frozen=frozen))


def gradient_of_hidden(made: MoELayer, scale: float) -> Tensor:
    """Return the gradient of the auxiliary losses and `scale` times the output for the hidden states."""
    hidden_TH = make_hidden(24).requires_grad_()
    (made(hidden_TH) * scale).square().sum().backward()
    assert hidden_TH.grad is not None
    return hidden_TH.grad


@pytest.mark.parametrize("frozen", [["router"], ["experts"], BOTH])
def test_what_is_frozen_has_no_gradient_and_all_else_has(frozen: list[str]) -> None:
    made = layer(frozen)
    gradient_of_hidden(made, 1.0)
    for name, parameter in made.named_parameters():
        assert (parameter.grad is None) == (name.split(".")[0] in frozen), name


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_the_gradient_of_the_tokens_is_that_of_a_layer_that_learns(scale: float) -> None:
    """With scale 0 it is the gradient of the auxiliary losses alone, through the frozen router."""
    expected_TH = gradient_of_hidden(layer([]), scale)
    assert expected_TH.any()
    assert torch.equal(gradient_of_hidden(layer(BOTH), scale), expected_TH)


class Counting(Mask):
    """Counts how often it learns; its constraint doubles its weight."""

    def __init__(self) -> None:
        super().__init__(self.Config(), None)  # type: ignore[arg-type]
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.learned = 0

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        self.learned += 1

    def constraints(self) -> list[Constraint]:
        return [(self.weight, lambda weight: 2 * weight)]


@pytest.mark.parametrize(("frozen", "learns"), [([], True), (["experts"], True), (["router"], False)])
def test_the_parts_of_a_frozen_router_learn_nothing_after_a_step(frozen: list[str], learns: bool) -> None:
    """A loss beside it does: it is no part of the router."""
    made = layer(frozen)
    inside, beside = Counting(), Counting()
    made.router.masks.append(inside)
    made.losses["counting"] = beside
    made.after_step(torch.zeros(4, dtype=torch.int64))
    assert (inside.learned, beside.learned) == (int(learns), 1)
    projected = [id(parameter) for parameter, _ in made.constraints()]
    assert (id(inside.weight) in projected, id(beside.weight) in projected) == (learns, True)
