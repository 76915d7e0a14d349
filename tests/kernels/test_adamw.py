"""The optimiser's passes against PyTorch's optimiser and float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.chosen import AdamW, sum_of_squares
from tests.support.kernels.drawn import draw

SHAPES = [(3,), (1,), (257, 131), (4, 16, 33), (0,)]
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(draw(*shape, seed=number)) for number, shape in enumerate(SHAPES)]


def groups_of(parameters: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_the_update_is_pytorchs(compiled: bool, factor: float, kind: type[torch.optim.Adam]) -> None:
    """Four steps, one parameter without a gradient in the second of them; state under PyTorch's names."""
    found, exact = make_parameters(), [torch.nn.Parameter(p.detach().double()) for p in make_parameters()]
    decoupled = kind is torch.optim.AdamW
    optimizer = AdamW(groups_of(found), decoupled_weight_decay=decoupled, fused=True, **OPTIONS)
    oracle = kind(groups_of(exact), foreach=False, **OPTIONS)
    for step in range(4):
        for number, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
            gradient = draw(*ours.shape, seed=100 * step + number)
            absent = step == 1 and number == 2
            ours.grad = None if absent else gradient.clone()
            theirs.grad = None if absent else gradient.double() * factor
        optimizer.update(factor)
        oracle.step()
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
        state, expected = optimizer.state[ours], oracle.state[theirs]
        assert float(state["step"]) == float(expected["step"]) == (3 if ours is found[2] else 4)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name].double(), expected[name], rtol=1e-5, atol=1e-7)


def test_the_two_kinds_of_decay_by_hand(compiled: bool) -> None:
    """The first step of Adam is lr in the direction of the gradient's sign; L2 can turn that sign."""
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-12, "weight_decay": 0.5, "fused": True}
    for decoupled, expected in ((True, 2.0 * (1 - 0.1 * 0.5) + 0.1), (False, 2.0 - 0.1)):
        weight = torch.nn.Parameter(torch.tensor([2.0]))
        weight.grad = torch.tensor([-1.0])  # clipped to a half: -0.5 + 0.5 * 2 is above 0
        AdamW([weight], decoupled_weight_decay=decoupled, **options).update(0.5)
        assert weight.item() == pytest.approx(expected, abs=1e-5)


def test_the_models_weights_are_the_rounded_ones(compiled: bool) -> None:
    parameters = make_parameters()
    rounded: dict[Tensor, Tensor] = {p: torch.full_like(p, 7.0, dtype=torch.bfloat16) for p in parameters}
    for number, parameter in enumerate(parameters):
        parameter.grad = draw(*parameter.shape, seed=number)
    AdamW(groups_of(parameters), fused=True, **OPTIONS).update(1.0, rounded)
    for parameter in parameters:
        assert torch.equal(rounded[parameter], parameter.detach().bfloat16())


def test_the_sum_of_squares(compiled: bool) -> None:
    tensors = [draw(*shape, seed=number) for number, shape in enumerate([*SHAPES, (3, 50_000)])]
    for each in (tensors, [tensor.bfloat16() for tensor in tensors]):
        expected = sum(tensor.double().square().sum() for tensor in each)
        torch.testing.assert_close(sum_of_squares(each), expected, rtol=1e-5, atol=0.0)
    for bad in (float("nan"), float("inf")):
        tensors[2][5, 5] = bad
        assert not sum_of_squares(tensors).isfinite()


def test_threads_change_nothing() -> None:
    tensors = [draw(70_001, seed=1), draw(33, 77, seed=2)]
    sums = set()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        sums.add(float(sum_of_squares(tensors)))
    assert len(sums) == 1
