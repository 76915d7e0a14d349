"""A whole layer, compiled and plain: the same output and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.choice import Kernels
from megamoe.kernels.library import Library
from tests.support.moe.build import make_hidden, make_layer, moe_config

pytestmark = pytest.mark.usefixtures("two_threads")

CASES: dict[str, dict[str, Any]] = {
    "top-2": {"num_experts": 8},
    "any number a token": {"num_experts": 8, "router": {"selector": {"name": "threshold", "threshold": 0.6}}},
    "drops": {
        "num_experts": 8,
        "router": {"capacity": {"name": "per_expert", "factor": 0.5, "min_capacity": 0}},
    },
    "shared, with losses": {"num_experts": 4, "num_shared_experts": 1, "losses": {"switch_balance": 0.3}},
}


def run_layer(tree: dict[str, Any], num_tokens: int, kernels: Kernels) -> list[Tensor]:
    """Return the output, and the gradients of the inputs and of all weights."""
    layer = make_layer(moe_config(**tree), kernels=kernels)
    hidden_TH = make_hidden(num_tokens).requires_grad_()
    output_TH = layer(hidden_TH)
    (output_TH * torch.linspace(-1, 2, output_TH.shape[1])).sum().backward()
    assert hidden_TH.grad is not None
    return [output_TH, hidden_TH.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("num_tokens", [1, 24])
@pytest.mark.parametrize("tree", CASES.values(), ids=CASES)
def test_compiled_equals_plain(tree: dict[str, Any], num_tokens: int, library: Library) -> None:
    compiled, plain = (run_layer(tree, num_tokens, Kernels(compiled=each)) for each in (True, False))
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
