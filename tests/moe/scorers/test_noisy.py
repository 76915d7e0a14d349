"""The noisy scorer: its start, the noise's size and keys, its gradient against a plain formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.choice import Kernels
from megamoe.moe import rng
from megamoe.moe.part import StepContext
from megamoe.moe.scorers.noisy import NoisyScorer
from tests.support.moe.build import HIDDEN, gradient_of, make_hidden, make_part
from tests.support.moe.draws import check_keys, rows_of

CONTEXT = StepContext(seed=1, step=4)


def learned(**options: Any) -> NoisyScorer:
    """A scorer whose weights are away from zero."""
    return make_part("scorer", "noisy", dims={"init_std": 0.4}, start="normal", **options)


def test_it_starts_with_no_signal_and_some_noise() -> None:
    scorer = make_part("scorer", "noisy", num_experts=512)
    scores_TE, extras = scorer(make_hidden(64), CONTEXT)
    assert not extras["clean_TE"].any()
    torch.testing.assert_close(extras["noise_std_TE"], torch.full((64, 512), math.log(2)))
    assert scores_TE.mean().item() == pytest.approx(0, abs=0.02)
    assert scores_TE.std().item() == pytest.approx(math.log(2), rel=0.02)  # softplus(0)


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_scores_and_gradients_follow_the_plain_formula(floor: float) -> None:
    scorer, hidden_TH = learned(noise_floor=floor), make_hidden(9)
    upstream_TE = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    scores_TE, extras = scorer(hidden_TH, CONTEXT)
    (scores_TE * upstream_TE).sum().backward()

    eps_TE = rng.normal(rng.key(1, 4, 1, "router_noise"), torch.arange(9), 4, kernels=Kernels()).double()
    w_gate, w_noise = (w.detach().double().requires_grad_() for w in (scorer.weight, scorer.noise_weight))
    x_TH = hidden_TH.double()
    std_TE = torch.log1p((x_TH @ w_noise.T).exp()) + floor
    plain_TE = x_TH @ w_gate.T + eps_TE * std_TE
    (plain_TE * upstream_TE).sum().backward()

    assert scores_TE.dtype == torch.float32
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(scores_TE.double(), plain_TE, **close)
    torch.testing.assert_close(extras["clean_TE"].double(), x_TH @ w_gate.T, **close)
    torch.testing.assert_close(extras["noise_std_TE"].double(), std_TE, **close)
    torch.testing.assert_close(gradient_of(scorer.weight).double(), w_gate.grad, **close)
    torch.testing.assert_close(gradient_of(scorer.noise_weight).double(), w_noise.grad, **close)


def test_noise_is_of_training_only() -> None:
    scorer, hidden_TH = learned(), make_hidden(5)
    assert not torch.allclose(scorer(hidden_TH, CONTEXT)[0], hidden_TH @ scorer.weight.T)
    scores_TE, extras = scorer.eval()(hidden_TH, CONTEXT)
    torch.testing.assert_close(scores_TE, hidden_TH @ scorer.weight.T)
    assert torch.equal(extras["clean_TE"], scores_TE)
    assert (extras["noise_std_TE"] > 0).all()


def test_noise_follows_its_key() -> None:
    """Without a signal the scores are the noise."""

    def noise(context: StepContext, layer: int) -> Tensor:
        scorer = make_part("scorer", "noisy", layer=layer)
        return scorer(torch.ones(rows_of(context), HIDDEN), context)[0]

    check_keys(noise)
