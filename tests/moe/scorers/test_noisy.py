"""The noisy scorer: its start, the noise's size and keys, its gradient against a plain formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.kernels.choice import Kernels
from megamoe.moe import rng
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.scorers.noisy import NoisyScorer
from tests.moe.build import HIDDEN, gradient_of, make_hidden, make_layer, make_part, moe_config

CONTEXT = StepContext(seed=1, step=4)


def learned(**options: Any) -> NoisyScorer:
    """A scorer whose weights are away from zero."""
    scorer: NoisyScorer = make_part("scorer", "noisy", dims={"init_std": 0.4}, start="normal", **options)
    return scorer


def test_it_starts_with_no_signal_and_some_noise() -> None:
    scorer = make_part("scorer", "noisy", num_experts=512)
    scores_TE, extras = scorer(make_hidden(64), CONTEXT)
    assert not extras["clean_TE"].any()
    torch.testing.assert_close(extras["noise_std_TE"], torch.full((64, 512), math.log(2)))
    assert scores_TE.mean().item() == pytest.approx(0, abs=0.02)
    assert scores_TE.std().item() == pytest.approx(math.log(2), rel=0.02)  # softplus(0)


def test_the_normal_start_draws_both_matrices_by_seed_and_layer() -> None:
    scorer = learned()
    assert scorer.weight.std().item() == pytest.approx(0.4, rel=0.3)
    assert scorer.noise_weight.std().item() == pytest.approx(0.4, rel=0.3)
    assert not torch.equal(scorer.weight, scorer.noise_weight)
    torch.manual_seed(9)
    assert torch.equal(learned().noise_weight, scorer.noise_weight)
    config = NoisyScorer.Config(start="normal")
    for dims in (Dims(HIDDEN, 4, 2, 0.4), Dims(HIDDEN, 4, 1, 0.4, seed=2)):
        assert (NoisyScorer(config, dims).noise_weight - scorer.noise_weight).abs().mean() > 0.1


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_scores_and_gradients_follow_the_plain_formula(floor: float) -> None:
    scorer, hidden_TH = learned(noise_floor=floor), make_hidden(9)
    upstream_TE = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    scores_TE, extras = scorer(hidden_TH, CONTEXT)
    (scores_TE * upstream_TE).sum().backward()

    eps_TE = rng.normal(rng.key(1, 4, 1, "router_noise"), torch.arange(9), 4, kernels=Kernels()).double()
    w_score_function, w_noise = (
        w.detach().double().requires_grad_() for w in (scorer.weight, scorer.noise_weight)
    )
    x_TH = hidden_TH.double()
    std_TE = torch.log1p((x_TH @ w_noise.T).exp()) + floor
    plain_TE = x_TH @ w_score_function.T + eps_TE * std_TE
    (plain_TE * upstream_TE).sum().backward()

    assert scores_TE.dtype == torch.float32
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(scores_TE.double(), plain_TE, **close)
    torch.testing.assert_close(extras["clean_TE"].double(), x_TH @ w_score_function.T, **close)
    torch.testing.assert_close(extras["noise_std_TE"].double(), std_TE, **close)
    torch.testing.assert_close(gradient_of(scorer.weight).double(), w_score_function.grad, **close)
    torch.testing.assert_close(gradient_of(scorer.noise_weight).double(), w_noise.grad, **close)


def test_noise_is_of_training_only() -> None:
    scorer, hidden_TH = learned(), make_hidden(5)
    assert not torch.allclose(scorer(hidden_TH, CONTEXT)[0], hidden_TH @ scorer.weight.T)
    scores_TE, extras = scorer.eval()(hidden_TH, CONTEXT)
    torch.testing.assert_close(scores_TE, hidden_TH @ scorer.weight.T)
    assert torch.equal(extras["clean_TE"], scores_TE)
    assert (extras["noise_std_TE"] > 0).all()


def noise(context: StepContext, num_tokens: int = 64, layer: int = 1) -> Tensor:
    """[T, E] of a scorer without a signal."""
    scores_TE: Tensor = make_part("scorer", "noisy", layer=layer)(torch.ones(num_tokens, HIDDEN), context)[0]
    return scores_TE


def test_noise_follows_the_token_not_its_place_or_rank() -> None:
    whole_TE = noise(CONTEXT)
    order_T = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    permuted_TE = noise(StepContext(1, 4, token_index_T=order_T))
    assert torch.equal(permuted_TE, whole_TE[order_T])
    ranks = [noise(StepContext(1, 4, 1.0, tokens_T), 16) for tokens_T in torch.arange(64).split(16)]
    assert torch.equal(torch.cat(ranks), whole_TE)


def test_noise_changes_with_seed_step_and_layer() -> None:
    others = [noise(StepContext(2, 4)), noise(StepContext(1, 5)), noise(CONTEXT, layer=2)]
    assert all((noise(CONTEXT) - other).abs().mean() > 0.3 for other in others)
    torch.manual_seed(7)
    assert torch.equal(noise(CONTEXT), noise(CONTEXT))


def test_scores_of_a_bf16_layer_are_computed_in_fp32() -> None:
    layer = make_layer(
        moe_config(num_experts=4, router={"scorer": {"name": "noisy", "start": "normal"}})
    ).bfloat16()
    routing = layer.eval().router(make_hidden(9).bfloat16(), layer.context)
    expected_TE = make_hidden(9).bfloat16().double() @ layer.get_parameter("router.scorer.weight").double().T
    torch.testing.assert_close(routing.scores_TE.double(), expected_TE, rtol=1e-5, atol=1e-5)
    assert routing.extras["noise_std_TE"].dtype == torch.float32


def test_a_negative_floor_is_refused() -> None:
    with pytest.raises(UserError, match="noise_floor must be at least 0"):
        moe_config(router={"scorer": {"name": "noisy", "noise_floor": -0.1}})


def test_it_can_be_counted_without_memory() -> None:
    with torch.device("meta"):
        scorer = NoisyScorer(NoisyScorer.Config(start="normal"), Dims(HIDDEN, 4))
    assert sum(parameter.numel() for parameter in scorer.parameters()) == 2 * 4 * HIDDEN
