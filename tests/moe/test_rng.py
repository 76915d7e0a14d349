"""Draws keyed by token: their spread, and the normal ones."""

from statistics import NormalDist

import pytest
import torch

from megamoe.kernels.choice import Kernels
from megamoe.moe import rng


def test_draws_are_uniform_and_uncorrelated() -> None:
    unit_TC = rng.uniform(rng.key(0, 0, 0, "x"), torch.arange(4096), 16, kernels=Kernels())
    assert unit_TC.min() >= 0 and unit_TC.max() < 1
    assert unit_TC.mean().item() == pytest.approx(0.5, abs=0.005)
    assert unit_TC.var().item() == pytest.approx(1 / 12, abs=0.002)
    correlation_CC = torch.corrcoef(unit_TC.T) - torch.eye(16)
    assert correlation_CC.abs().max() < 0.07


def test_the_key_depends_on_every_field() -> None:
    fields = [(1, 1, 1, "a"), (2, 1, 1, "a"), (1, 2, 1, "a"), (1, 1, 2, "a"), (1, 1, 1, "b"), (1, 11, 1, "a")]
    keys = [rng.key(*field) for field in fields]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)


def test_normal_draws_are_the_inverse_of_the_distribution_at_the_uniform_ones() -> None:
    draw_key, index_T = rng.key(1, 2, 3, "n"), torch.arange(4096)
    middle_TC = rng.uniform(draw_key, index_T, 16, kernels=Kernels()).double() + 2.0**-25
    normal_TC = rng.normal(draw_key, index_T, 16, kernels=Kernels())
    torch.testing.assert_close(normal_TC.double(), torch.special.ndtri(middle_TC), rtol=1e-6, atol=1e-7)
    assert normal_TC.dtype == torch.float32
    assert normal_TC.std().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("unit", [0.0, 1 - 2**-24, 0.5, 0.5 - 2**-24])
def test_the_outermost_and_middle_normal_draws_are_finite(
    monkeypatch: pytest.MonkeyPatch, unit: float
) -> None:
    monkeypatch.setattr(rng, "uniform", lambda *given, **more: torch.tensor([[unit]]))
    expected = NormalDist().inv_cdf(unit + 2**-25)
    assert rng.normal(0, torch.arange(1), 1, kernels=Kernels()).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [None, 0.1])
def test_nothing_is_drawn_on_the_meta_device(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.device] = []
    for name in ("normal_", "trunc_normal_"):
        monkeypatch.setattr(f"torch.nn.init.{name}", lambda weight, **_: drawn.append(weight.device))
    for device in ("meta", "cpu"):
        rng.init_weight(torch.empty(3, 2, device=device), 5, 0.1, scale)
    assert drawn == [torch.device("cpu")]
