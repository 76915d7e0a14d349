"""What a layer observes, by hand."""

import math

import pytest
import torch

from megamoe.kernels.choice import DEFAULT_KERNELS
from megamoe.kernels.router import SMALLEST, gate_sums
from megamoe.moe.observation import observe
from megamoe.moe.routing import Pairs, Routing
from tests.support.moe.build import make_layer, moe_config

TOP_2 = {"selector": {"name": "top_k", "k": 2}}


def test_gate_entropy_and_top_1_by_hand() -> None:
    probs_TE = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.9, 0.3, 0.3, 0.3]])
    token_N = torch.tensor([0, 0, 2])
    entropy, top_1, width_D = gate_sums(probs_TE, token_N, DEFAULT_KERNELS)
    third = -(0.5 * math.log(0.5) + 3 / 6 * math.log(1 / 6))  # its shares are 1/2 and three times 1/6
    assert float(entropy) == pytest.approx(math.log(2) + 0 + third)
    assert float(top_1) == pytest.approx(0.5 + 1 + 0.5)
    assert width_D.tolist() == [1, 1, 1, 0, 0]
    for tokens, expected in ((0, [0.0, 0.0]), (1, [math.log(SMALLEST), 0.0])):
        found = gate_sums(torch.zeros(tokens, 4), token_N[:0], DEFAULT_KERNELS)
        assert [float(it) for it in found[:2]] == pytest.approx(expected)


def test_gate_sums_of_many_tokens_are_pytorchs_in_double_precision() -> None:
    """Shares from 0 over subnormal numbers to 1."""
    probs_TE = (20 * torch.randn(500, 16)).softmax(1)
    probs_TE[:, 3] = 0.0
    probs_TE[::7, 5] = 1e-41
    probs_TE[9] = torch.eye(16)[2]
    shares_TE = probs_TE.double() / probs_TE.double().sum(1, keepdim=True)
    token_N = torch.arange(500)
    entropy, top_1, _ = gate_sums(probs_TE, token_N, DEFAULT_KERNELS)
    assert float(entropy) == pytest.approx(float(torch.special.entr(shares_TE).sum()), rel=1e-6)
    assert float(top_1) == pytest.approx(float(shares_TE.amax(1).sum()), rel=1e-6)
    probs_TE[0, 0] = float("nan")
    broken = gate_sums(probs_TE, token_N, DEFAULT_KERNELS)
    assert all(math.isnan(float(found)) for found in broken[:2])


def test_experts_per_token_by_hand() -> None:
    """Token 0 has two experts, token 1 none, token 2 one expert named twice and another one."""
    token_N, expert_N = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 0, 1, 1, 0])
    pairs = Pairs(token_N, expert_N, torch.ones(5), torch.zeros(5, dtype=torch.int64))
    half_TE = torch.full((3, 2), 0.5)
    routing = Routing(half_TE, half_TE, half_TE, half_TE, wanted=pairs, pairs=pairs)
    seen = observe(routing, {})
    assert seen.width_D.tolist() == [1, 0, 2], "of 2 experts a token counts as having at most 2"
    assert seen.load_E.tolist() == seen.wanted_E.tolist() == [2, 3]


def test_parts_declare_their_numbers() -> None:
    score_function = {"name": "sigmoid", "bias_update": 0.1}
    router = {**TOP_2, "scorer": "cosine", "score_function": score_function}
    layer = make_layer(moe_config(num_experts=4, router=router))
    layer.router.score_function.bias_E.copy_(torch.tensor([0.1, -0.2, 0.0, 0.3]))  # type: ignore[union-attr]
    found = {
        f"{name}/{metric}": value.item()
        for name, part in layer.measured_parts().items()
        for metric, value in part.metrics().items()
    }
    assert found == pytest.approx(
        {
            "router.scorer/temperature": 0.07,
            "router.scorer/embedding_norm": 0.1,
            "router.score_function/bias_range": 0.5,
        }
    )
