"""examples/deepep_exchange.py with a stand-in of DeepEP: the same layer as with the direct exchange."""

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import registry
from megamoe.config import PartChoice
from megamoe.errors import UserError
from megamoe.moe.dispatch.dispatcher import DispatchConfig
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.process_groups import ParallelGroups
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from tests.support.fakes import deep_ep
from tests.support.moe.build import moe_config, observed
from tests.support.ranks.pool import Pool

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/deepep_exchange.py"
# The parameters of deep_ep/buffer.py, in their order.
ASYNC = ["previous_event", "async_finish", "allocate_on_comm_stream"]
OF_TOKENS = ["num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert"]
PUBLISHED = {
    "get_dispatch_layout": ["topk_idx", "num_experts", *ASYNC],
    "dispatch": ["x", "handle", *OF_TOKENS, "topk_idx", "topk_weights", "expert_alignment", "config", *ASYNC],
    "combine": ["x", "handle", "topk_weights", "config", *ASYNC],
}


def test_the_stand_in_has_the_published_signatures() -> None:
    for name, parameters in PUBLISHED.items():
        _, *found = inspect.signature(getattr(deep_ep.Buffer, name)).parameters
        assert found == parameters


def exchange_of(name: str) -> PartChoice:
    if "deepep" not in registry.list_parts("exchange"):
        registry.load_plugin(str(EXAMPLE))
    return PartChoice("exchange", name, registry.get_part("exchange", name).Config())


def outcomes() -> list[dict[str, Tensor]]:
    """Job: a layer's output and gradients with both exchanges."""
    launch.start(launch.find_world(), timeout_minutes=1)
    module: Any = ModuleType("deep_ep")
    module.Buffer = deep_ep.Buffer
    sys.modules["deep_ep"] = module
    groups = start_groups(Layout(2, expert=2), timeout_minutes=1).layer
    router = {"selector": {"name": "top_k", "k": 3}, "capacity": {"name": "per_expert", "factor": 0.9}}
    config = moe_config(num_experts=8, router=router, num_shared_experts=1)
    found = []
    for name in ("direct", "deepep"):
        shape = LayerShape(16, 32, 1, "swiglu", 0.3, 0.3, seed=1, exchange=exchange_of(name))
        layer = MoELayer(config, shape, StepContext(), groups).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        hidden_TH = torch.randn(20, 16, generator=generator).bfloat16().requires_grad_()
        output_TH = layer(hidden_TH)
        output_TH.backward(torch.randn(20, 16, generator=generator).bfloat16())
        assert hidden_TH.grad is not None
        gradients = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        load = {"load": observed(layer).load_E}
        found.append({"output": output_TH.detach(), "hidden": hidden_TH.grad, **load, **gradients})
    return found


def test_a_layer_is_the_same(pool: Pool) -> None:
    for direct, other in pool.run(outcomes, ranks=2):
        assert other.keys() == direct.keys()
        for name, value in direct.items():
            scale = float(value.abs().max())
            torch.testing.assert_close(other[name], value, rtol=0, atol=0.02 * scale, msg=name)


@pytest.mark.parametrize(
    ("further", "key"), [({"fp8": True}, "parallel.exchange_dtype"), ({}, "parallel.expert_tensor")]
)
def test_what_it_cannot_do_is_refused(further: dict[str, Any], key: str, own_registry: None) -> None:
    choice = exchange_of("deepep")
    with pytest.raises(UserError, match=f"^{key}: .*legal: "):
        options = DispatchConfig(8, ParallelGroups(), **further)
        registry.get_part("exchange", "deepep")(choice.options, options)
