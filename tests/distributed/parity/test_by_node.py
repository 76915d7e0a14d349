"""The exchange by node equals the direct one in whole layers: every mode, every preset, compositions."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import registry
from megamoe.config import PartChoice
from megamoe.config.schema import MoEConfig
from megamoe.moe.dispatch import by_node
from megamoe.moe.experts.grouped import GroupedExperts, Products
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.recompute import recomputed
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from tests.moe.test_compositions import DRAWS, composed, part_of
from tests.support.moe.build import make_context, moe_config, observed, set_tokens
from tests.support.moe.part_layers import PARTS, moe_tree
from tests.support.ranks.pool import Pool

HIDDEN, FFN, TOKENS = 16, 32, 24
LAYOUTS = {
    "2 nodes of 1": Layout(2, expert=2, nodes=2),
    "1 node of 2": Layout(2, expert=2),
    "2 nodes of 2": Layout(4, expert=4, nodes=2),
    "4 nodes of 1": Layout(4, expert=4, nodes=4),
    "2 nodes of 1, slices": Layout(4, expert=2, expert_tensor=2, nodes=2),
    "2 nodes of 2, spread tokens": Layout(4, tensor=2, expert=4, nodes=2),
}
QUICK = "2 nodes of 2, spread tokens"
TOP_2 = {"selector": {"name": "top_k", "k": 2}}


@dataclass(frozen=True)
class Case:
    """moe: the layer. again: computed again in the backward pass: nothing, the experts, or the layer. tokens:
    of each data-parallel rank in turn. host_counts: the experts' products read their counts on the host.
    """

    moe: MoEConfig
    again: str = ""
    fp8: bool = False
    tokens: tuple[int, ...] = (TOKENS,) * 4
    dtype: torch.dtype = torch.float32
    host_counts: bool = False
    further: dict[str, Any] = field(default_factory=dict)


def modes() -> dict[str, Case]:
    """The same few layers in every mode that the exchange knows."""

    def of(num_experts: int = 16, **tree: Any) -> MoEConfig:
        return moe_config(**{"num_experts": num_experts, "router": TOP_2, **tree})

    capacity = {"name": "per_expert", "factor": 0.6}
    local = {**TOP_2, "masks": [{"name": "gating_dropout", "rate": 1.0}]}
    return {
        "top-1": Case(of(router="switch")),
        "top-8": Case(of(router={"selector": {"name": "top_k", "k": 8}})),
        "a threshold": Case(of(router={"selector": "threshold"})),
        "a rank without tokens": Case(of(), tokens=(0, 24, 8, 0)),
        "no rank has tokens": Case(of(), tokens=(0, 0, 0, 0)),
        "unequal ranks": Case(of(), tokens=(4, 40, 12, 20)),
        "capacity": Case(of(router={**TOP_2, "capacity": capacity})),
        "local routing": Case(of(router=local)),
        "shared experts": Case(of(num_shared_experts=2)),
        "dropout": Case(of(expert_output_dropout=0.2, expert_activation_dropout=0.1)),
        "experts again": Case(of(), again="moe"),
        "weights inside": Case(of(num_shared_experts=1, weights_in_activation=True), again="moe"),
        "layer again": Case(of(num_shared_experts=1), again="moe_layer"),
        "fp8": Case(of(), fp8=True),
        "fp8, layer again": Case(of(num_shared_experts=1), again="moe_layer", fp8=True),
        "bf16": Case(of(), dtype=torch.bfloat16),
        "counts on the host": Case(of(), again="moe", host_counts=True),
    }


MODES = modes()


def cases() -> dict[str, Case]:
    """Every mode, every part with what fits it (all presets are among them), and random compositions."""
    found = dict(MODES)
    found |= {f"{kind} {name}": Case(moe_config(**moe_tree(kind, name))) for kind, name in PARTS}
    found |= {f"composition {n}": Case(composed(n, part_of(n))[0]) for n in range(DRAWS)}
    return {name: case for name, case in found.items() if not _is_refused(case.moe)}


def _is_refused(moe: MoEConfig) -> bool:
    """Whether these layouts cannot cut the experts, or a capacity in fixed shares refuses the exchange."""
    return moe.num_experts % 4 != 0 or getattr(moe.router.capacity.options, "pad", False)


def layer_outcome(case: Case, layout: Layout, groups: Any, exchange: str) -> dict[str, Tensor]:
    """Forward and backward of one layer on this rank, with this exchange."""
    rank = dist.get_rank()
    shape = LayerShape(
        HIDDEN, FFN, 1, "swiglu", 0.3, 0.3, seed=1, vocab_size=32, exchange_fp8=case.fp8,
        exchange=PartChoice.default("exchange") if exchange == "by_node" else _direct(),
        recomputed=frozenset({"moe"} if case.again == "moe" else ()),
        products=Products(host_counts=case.host_counts),
    )  # fmt: skip
    tokens = case.tokens[rank // layout.tensor]
    generator = torch.Generator().manual_seed(rank)
    own = tokens // layout.batch_ranks
    sequences = 4 if tokens % 4 == 0 and tokens else 1
    context = make_context(
        seed=5, step=3, token_ids_T=torch.arange(tokens) % 32, sample_index_B=torch.arange(sequences),
        data_group=dist.group.WORLD, micro_batch=rank // layout.tensor,
    )  # fmt: skip
    layer = MoELayer(case.moe, shape, context, groups).to(case.dtype)
    rollouts = [loss.num_rollouts for loss in layer.losses.objectives.values()]
    set_tokens(context, num_rollouts=max(rollouts, default=1))
    hidden_TH = torch.randn(own, HIDDEN, generator=generator).to(case.dtype).requires_grad_()
    upstream_TH = torch.randn(own, HIDDEN, generator=generator).to(case.dtype)
    output_TH = recomputed(layer, [layer], hidden_TH) if case.again == "moe_layer" else layer(hidden_TH)
    output_TH.backward(upstream_TH)
    seen = observed(layer)
    gradient = torch.zeros_like(hidden_TH) if hidden_TH.grad is None else hidden_TH.grad
    found = {"output": output_TH.detach(), "hidden": gradient, "load": seen.load_E, "width": seen.width_D}
    return found | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


def _direct() -> PartChoice:
    return PartChoice("exchange", "direct", registry.get_part("exchange", "direct").Config())


def differences(layout: Layout, several: dict[str, Case]) -> Iterator[str]:
    """Yield what differs between the two exchanges on this rank, by case."""
    groups = start_groups(layout, timeout_minutes=1).layer
    for name, case in several.items():
        direct = layer_outcome(case, layout, replace(groups, between_nodes=None, inside_node=None), "direct")
        by_node = layer_outcome(case, layout, groups, "by_node")
        tolerance = 1e-6 if case.dtype == torch.float32 else 1e-2
        if by_node.keys() != direct.keys():
            yield f"{name}: {sorted(by_node.keys() ^ direct.keys())}"
        for what, value in direct.items():
            scale = max(1.0, float(value.float().abs().max())) if value.numel() else 1.0
            off = (by_node[what].double() - value.double()).abs()
            bound = 0.0 if what in ("load", "width") else tolerance * scale
            if value.numel() and not float(off.max()) <= bound:
                yield f"{name}: {what} differs by {float(off.max()):.2e} of {scale:.2e}"


def compare(layout: Layout, which: str) -> list[str]:
    """Job: what differs on this rank, and which exchanges were taken."""
    launch.start(launch.find_world(), timeout_minutes=2)
    taken: set[type] = set()
    real = by_node.ByNodeDispatch.start

    def started(self: Any, *given: Any) -> Any:
        taken.add(type(self))
        return real(self, *given)

    by_node.ByNodeDispatch.start = started  # type: ignore[method-assign,assignment]
    try:
        found = list(differences(layout, MODES if which == "modes" else cases()))
    finally:
        by_node.ByNodeDispatch.start = real  # type: ignore[method-assign]
    if bool(taken) != (layout.nodes > 1):
        found.append(f"taken: {taken}")
    return found


def read_once(layout: Layout) -> list[list[str]]:
    """Job: what is copied to the host in both passes of a layer whose experts read their counts there."""
    launch.start(launch.find_world(), timeout_minutes=2)
    groups = start_groups(layout, timeout_minutes=1).layer
    in_one_group = replace(groups, between_nodes=None, inside_node=None)
    copied: list[str] = []
    real_copy, real_forward = Tensor.cpu, GroupedExperts.forward

    def cpu(self: Tensor) -> Tensor:
        copied.append(str(tuple(self.shape)))
        return real_copy(self)

    def forward(self: Any, rows: Tensor, counts_E: Tensor, *given: Any, **options: Any) -> Tensor:
        if not torch.equal(options["host_E"], counts_E):
            copied.append(f"{options['host_E']} is not {counts_E}")
        return real_forward(self, rows, counts_E, *given, **options)

    found = []
    for again, (exchange, own) in product(("", "moe"), (("direct", in_one_group), ("by_node", groups))):
        copied.clear()
        with patch.object(Tensor, "cpu", cpu), patch.object(GroupedExperts, "forward", forward):
            layer_outcome(replace(MODES["counts on the host"], again=again), layout, own, exchange)
        found.append(list(copied))
    return found


def test_counts_for_the_experts_come_with_those_of_the_exchange(pool: Pool) -> None:
    """One copy to the host in a layer and micro batch, though the experts are computed again."""
    layout = LAYOUTS[QUICK]
    for found in pool.run(read_once, layout, ranks=layout.ranks, timeout_s=600):
        assert [len(copies) for copies in found] == [1] * 4, found


@pytest.mark.parametrize(
    ("layout", "which"),
    [(QUICK, "modes"), *(pytest.param(layout, "all", marks=pytest.mark.full) for layout in LAYOUTS)],
)
def test_layers_equal_those_of_the_direct_exchange(pool: Pool, layout: str, which: str) -> None:
    sizes = LAYOUTS[layout]
    for found in pool.run(compare, sizes, which, ranks=sizes.ranks, timeout_s=3000):
        assert not found, "\n".join(found)
