"""Fixed shares: the rows of each expert by hand, and a layer that equals the one without empty rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts.rows import sum_rows
from megamoe.moe.dispatch.dispatcher import rows_of_slots
from megamoe.moe.layer import MoELayer
from megamoe.moe.routing import CapacitySlots
from tests.support.moe.build import make_hidden, make_layer, make_pairs, moe_config, observed

TOKENS = 24
TOP_2 = {"selector": {"name": "top_k", "k": 2}}


def test_the_rows_by_hand() -> None:
    """Three tokens of two experts each; expert 1 has 2 slots for 3 pairs, expert 2 a place too many."""
    pairs = make_pairs([[1, 0], [1, 2], [0, 1]], [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    slots = CapacitySlots(torch.tensor([0, 0, 1, 0, 1, 2]), size=2)
    assert slots.kept_N().tolist() == [True] * 5 + [False]
    filled = slots.filled(pairs, num_tokens=3, num_experts=3)
    assert filled.expert_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert filled.token_N.tolist() == [0, 2, 0, 1, 1, 3]
    torch.testing.assert_close(filled.weight_N, torch.tensor([0.2, 0.5, 0.1, 0.3, 0.4, 0.0]))


def layer_of(pad: bool, **tree: Any) -> MoELayer:
    capacity = {"name": "per_expert", "factor": tree.pop("factor", 1.0), "pad": pad}
    router = {**TOP_2, **tree.pop("router", {}), "capacity": capacity}
    return make_layer(moe_config(num_experts=8, router=router, **tree))


def outcome(layer: MoELayer, hidden_TH: Tensor) -> dict[str, Tensor]:
    """The output, every gradient, and what is observed."""
    hidden_TH = hidden_TH.clone().requires_grad_()
    output_TH = layer(hidden_TH)
    upstream_TH = torch.randn(output_TH.shape, generator=torch.Generator().manual_seed(3))
    output_TH.backward(upstream_TH)
    seen = observed(layer)
    assert hidden_TH.grad is not None
    return {
        "output": output_TH.detach(),
        "hidden": hidden_TH.grad,
        "load": seen.load_E,
        "wanted": seen.wanted_E,
        "width": seen.width_D,
        "entropy": seen.entropy,
        **{name: each.grad for name, each in layer.named_parameters() if each.grad is not None},
    }


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"factor": 0.5},
        {"factor": 8.0},
        {"router": {"selector": {"name": "top_k", "k": 3, "renormalise": "after_drops"}}},
        {"router": {"selector": {"name": "threshold"}}},
        {"num_shared_experts": 1, "expert_bias": True, "losses": {"switch_balance": 0.1}},
        {"expert_output_dropout": 0.2, "expert_activation_dropout": 0.1},
    ],
)
def test_it_equals_rows_without_padding(tree: dict[str, Any]) -> None:
    hidden_TH = make_hidden(TOKENS)
    plain = outcome(layer_of(False, **dict(tree)), hidden_TH)
    padded = outcome(layer_of(True, **dict(tree)), hidden_TH)
    assert padded.keys() == plain.keys()
    for name, value in plain.items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(padded[name], value, rtol=0, atol=1e-6 * scale, msg=name)
    assert int(plain["load"].sum()) > 0


def test_kernels_do_not_add_up_the_empty_places() -> None:
    """They can be thousands of rows, which one thread, or one program on CUDA, would add one by one."""
    if not Kernels().library_on(torch.device("cpu")):
        pytest.skip("there is no compiled library here")
    for token_N, ends_T in (([2, 0, 2, 1, 2], [1, 2, 2]), ([], [0])):
        tokens = len(ends_T) - 1
        pairs = SimpleNamespace(token_N=torch.tensor(token_N, dtype=torch.int64), weight_N=None)
        routing = SimpleNamespace(pairs=pairs, num_tokens=tokens)
        (rows, *_), hidden_TH = rows_of_slots(torch.ones(tokens, 4), routing, Kernels())  # type: ignore[arg-type]
        assert rows.ends_T is not None and rows.ends_T.tolist() == ends_T
        assert sum_rows(hidden_TH[rows.token_N], rows, Kernels())[:tokens].eq(1).all()
