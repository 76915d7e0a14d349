"""The linear scorer: fp32 arithmetic, and jitter keyed by token."""

from typing import Any

import pytest
import torch

from megamoe.moe.part import StepContext
from tests.support.moe.build import HIDDEN, make_hidden, make_layer, make_part, moe_config
from tests.support.moe.draws import check_keys, rows_of

JITTER: dict[str, Any] = {"jitter": 0.25}


def test_autocast_does_not_reach_the_router() -> None:
    layer = make_layer(moe_config(num_experts=4))
    expected_TE = layer.router(make_hidden(9), layer.context).scores_TE
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.router(make_hidden(9), layer.context).scores_TE, expected_TE)


def test_the_bias_is_added_in_fp32_and_learns() -> None:
    scorer = make_part("scorer", "linear", bias=True).bfloat16()
    hidden_TH = make_hidden(9).bfloat16()
    plain_TE = scorer(hidden_TH, StepContext())
    assert not scorer.bias.any()
    scorer.bias.data = torch.tensor([1.0, -2.0, 0.5, 3e-3]).bfloat16()
    scores_TE = scorer(hidden_TH, StepContext())
    assert torch.equal(scores_TE, plain_TE + scorer.bias.float()) and scores_TE.dtype == torch.float32
    scores_TE.sum().backward()
    assert scorer.bias.grad.tolist() == [9.0] * 4


def noise(context: StepContext, num_tokens: int = 64, layer: int = 1) -> torch.Tensor:
    """[T, H]: what jitter multiplies the input by, read off a scorer whose matrix is the identity."""
    scorer = make_part("scorer", "linear", num_experts=HIDDEN, layer=layer, **JITTER)
    scorer.weight.data = torch.eye(HIDDEN)
    return scorer(torch.ones(num_tokens, HIDDEN), context)


def test_jitter_follows_its_key() -> None:
    check_keys(lambda context, layer: noise(context, rows_of(context), layer))


def test_jitter_fills_its_bounds_and_no_more() -> None:
    factor_TH = noise(StepContext(seed=1), num_tokens=512)
    assert factor_TH.min() >= 0.75 and factor_TH.max() <= 1.25
    assert factor_TH.min() < 0.76 and factor_TH.max() > 1.24
    assert factor_TH.mean().item() == pytest.approx(1, abs=0.01)


def test_jitter_is_of_training_only() -> None:
    scorer = make_part("scorer", "linear", **JITTER)
    hidden_TH = make_hidden(5)
    plain_TE = hidden_TH @ scorer.weight.T
    assert not torch.allclose(scorer(hidden_TH, StepContext()), plain_TE)
    torch.testing.assert_close(scorer.eval()(hidden_TH, StepContext()), plain_TE)
