"""AdamW with moments in bf16: its rounding, and its steps beside those of PyTorch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.optim.short_moments import CHUNK, ShortMoments, rounded_at_random

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def key(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


def test_a_number_becomes_one_of_its_neighbours_in_proportion() -> None:
    below, above = 1.0, 1.0078125  # neighbours in bf16
    values = torch.full((1,), below + 0.25 * (above - below))
    found = torch.cat([rounded_at_random(values, key(step)) for step in range(4000)])
    assert set(found.tolist()) == {below, above}
    assert float((found == above).float().mean()) == pytest.approx(0.25, abs=0.03)  # 4 sigma
    negative = torch.cat([rounded_at_random(-values, key(step)) for step in range(4000)])
    assert float((negative == -above).float().mean()) == pytest.approx(0.25, abs=0.03)


def test_what_bf16_can_hold_and_what_is_not_finite_stay() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf")])
    assert torch.equal(rounded_at_random(values, key(3)).float(), values)
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)  # of x86, of CUDA, and the last one
    for number in range(8):
        assert rounded_at_random(nan.view(torch.float32), key(number)).isnan().all()


def test_many_numbers_are_right_on_average() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    error = rounded_at_random(values, key(1)).double() - values.double()
    assert abs(float(error.mean())) < 4 * float(error.std()) / 256
    again = rounded_at_random(values, key(2))
    assert 0.2 < float((again != rounded_at_random(values, key(1))).float().mean()) < 0.8


def test_a_moment_moves_where_the_nearest_bf16_would_stand_still() -> None:
    """beta2 = 0.999: a change of a thousandth is below half of bf16's step."""
    moment = torch.ones(4096, dtype=torch.bfloat16)
    nearest = moment.clone()
    squares = 4 + 0.1 * torch.randn(4096, generator=torch.Generator().manual_seed(3))
    for step in range(200):
        moment = rounded_at_random(0.999 * moment.float() + 0.001 * squares, key(step))
        nearest = (0.999 * nearest.float() + 0.001 * squares).bfloat16()
    expected = 4 - 3 * 0.999**200
    assert float(nearest.float().mean()) == 1.0
    assert float(moment.float().mean()) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_close_to_those_with_moments_in_fp32(
    decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step differs by the update's own rounding only: its moments are fp32 when they are used."""
    monkeypatch.setattr("megamoe.optim.short_moments.CHUNK", 64)
    assert CHUNK % 64 == 0
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(10, 20, generator=generator)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    kinds = (torch.optim.Adam, ShortMoments)
    optimizers = [
        kind([weight], decoupled_weight_decay=decoupled, **OPTIONS)
        for kind, weight in zip(kinds, weights, strict=True)
    ]
    for number in range(30):
        gradient = torch.randn(10, 20, generator=generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        if number == 0:
            assert torch.equal(weights[0], weights[1])
    first, second = (weight.detach() for weight in weights)
    moved = (first - start).norm()
    assert float((first - second).norm() / moved) < 0.01
    state = optimizers[1].state[weights[1]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert float(state["step"]) == 30
