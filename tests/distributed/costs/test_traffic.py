"""The bytes that a layout sends, counted at the collectives, are those of the formulas."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

from megamoe.apps.plan.traffic import context_traffic, cut_pair_traffic, moe_traffic
from megamoe.config.schema import ParallelConfig
from megamoe.kernels.choice import DEFAULT_KERNELS
from megamoe.model.build import build_model
from megamoe.moe.dispatch.transfer import Transfer
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.pipeline.links import StageLinks
from megamoe.parallel.process_groups import start_groups
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

HIDDEN, FFN, EXPERTS, K, TOKENS = 16, 32, 8, 2, 32
# tensor, expert, expert_tensor, pipeline, context, nodes
LAYOUTS: dict[int, list[tuple[int, ...]]] = {
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1, 1, 1, 2)],
    4: [
        (1, 4, 1),
        (1, 2, 2),
        (2, 2, 1),
        (2, 2, 2),
        (4, 4, 1),
        (4, 1, 4),
        (2, 4, 1),
        (2, 2, 1, 1, 2),
        (1, 2, 1, 2, 2),
        (1, 2, 1, 1, 4),
        (1, 4, 1, 1, 1, 2),
        (1, 4, 1, 1, 1, 4),
        (1, 2, 2, 1, 1, 2),
        (2, 4, 1, 1, 1, 2),
    ],
}


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Bytes that leave this rank, by collective; a gather and a reduction as a ring sends them."""
    sent: Counter[str] = Counter()

    def counting(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent[name] += COLLECTIVES[name](*args, **kwargs)
            return real(*args, **kwargs)

        return call

    places = [(dist, name, name) for name in COLLECTIVES]
    for module in (layers, mappings):  # Megatron-Core has names of its own for two of them
        places.append((module, "dist_all_gather_func", "all_gather_into_tensor"))
        places.append((module, "dist_reduce_scatter_func", "reduce_scatter_tensor"))
    real = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, collective in places:
            setattr(module, name, counting(collective, getattr(module, name)))
        yield sent
    finally:
        for module, name, function in real:
            setattr(module, name, function)


def _all_to_all(
    _: Tensor, rows: Tensor, got: Any = None, sent: Any = None, group: Any = None, **more: Any
) -> int:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    home = len(rows) // size if sent is None else sent[rank]
    return (len(rows) - home) * rows[:1].numel() * rows.element_size()


def _ring(whole: Tensor, group: Any, rounds: int) -> int:
    size = dist.get_world_size(group)
    return rounds * (size - 1) * whole.numel() * whole.element_size() // size


COLLECTIVES: dict[str, Any] = {
    "all_to_all_single": _all_to_all,
    "all_gather_into_tensor": lambda whole, own, group=None, **_: _ring(whole, group, 1),
    "reduce_scatter_tensor": lambda own, whole, group=None, **_: _ring(whole, group, 1),
    "all_reduce": lambda whole, op=None, group=None, **_: _ring(whole, group, 2),
}


def send_evenly(
    layouts: list[tuple[int, ...]], dtype: torch.dtype, fp8: bool, latent_size: int | None
) -> list[Counter[str]]:
    """Job: what this rank's layer sends, forward and backward, by layout; every expert has as many rows."""
    launch.start(launch.find_world(), timeout_minutes=1)
    config = small_run(
        moe__num_experts=EXPERTS,
        moe__router={"selector": {"name": "top_k", "k": K}},
        moe__num_shared_experts=0,
        moe__latent_size=latent_size,
    )
    found = []
    for sizes in layouts:
        layout = Layout(dist.get_world_size(), *sizes)
        groups = start_groups(layout, timeout_minutes=1).layer
        shape = LayerShape(HIDDEN, FFN, 1, "swiglu", 0.1, 0.1, seed=1, exchange_fp8=fp8)
        layer = MoELayer(config.moe, shape, StepContext(), groups).to(dtype)
        layer.router.scorer.weight.data = torch.eye(EXPERTS, HIDDEN, dtype=dtype)
        first_T = torch.arange(TOKENS // layout.batch_ranks) % EXPERTS
        axes = torch.eye(EXPERTS, HIDDEN, dtype=dtype)
        hidden_TH = 2 * axes[first_T] + axes[first_T - 1]
        with counted_bytes() as sent:
            layer(hidden_TH.requires_grad_()).sum().backward()
        assert layer.observation is not None
        assert layer.observation.load_E.unique().tolist() == [TOKENS * K // EXPERTS]
        found.append(sent)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_an_even_moe_layer(pool: Pool, ranks: int) -> None:
    """A token has two neighbouring experts: with 2 nodes of 4 experts each it is on 1.25 of them."""
    plain, latent = (torch.bfloat16, False, None), (torch.float32, False, HIDDEN // 4)
    for dtype, fp8, row in ((torch.float32, False, None), plain, (torch.bfloat16, True, None), latent):
        ranks_found = pool.run(send_evenly, LAYOUTS[ranks], dtype, fp8, row, ranks=ranks)
        for number, sizes in enumerate(LAYOUTS[ranks]):
            expected = moe_traffic(
                Layout(ranks, *sizes),
                sequence=True,
                tokens=TOKENS,
                pairs=TOKENS * K,
                hidden_size=HIDDEN,
                num_experts=EXPERTS,
                width=dtype.itemsize,
                row_size=row,
                nodes_of_token={1: 1.0, 2: 1.25, 4: 1.5}[Layout(ranks, *sizes).nodes],
                fp8=fp8,
            )
            for found in ranks_found:
                assert sum(found[number].values()) == expected.total, sizes
                if Layout(ranks, *sizes).nodes == 1:
                    counts_by_hand = 8 * EXPERTS * (sizes[1] - 1) // sizes[1]
                    rows = found[number]["all_to_all_single"] - counts_by_hand
                    assert rows == expected.rows + expected.slices, sizes


def sent_in_attention(context: int, tensor: int, groups_of_queries: int) -> float:
    """Job: what this rank sends in the attention of one block more, forward and backward."""
    launch.start(launch.find_world(), timeout_minutes=1)
    sent = []
    for blocks in (1, 2):
        config = small_run(
            model__num_layers=blocks,
            model__num_attention_heads=8,
            model__num_query_groups=groups_of_queries,
            moe={},
            parallel__tensor=tensor,
            parallel__context=context,
        )
        layout = Layout(dist.get_world_size(), tensor, context=context)
        groups = start_groups(layout, timeout_minutes=1)
        model = build_model(config, 64, MoELayer, DEFAULT_KERNELS, context=groups.context)  # type: ignore[arg-type]
        tokens_BS = torch.arange(TOKENS)[None, :]
        with counted_bytes() as counted:
            model(tokens_BS, tokens_BS, tokens_BS).sum().backward()
        sent.append(counted["all_to_all_single"])
    return sent[1] - sent[0]


FULL = [pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((2, 1, 8), (4, 1, 4))]


@pytest.mark.parametrize(("context", "tensor", "groups"), [(2, 2, 8), (4, 1, 2), *FULL])
def test_an_attention_with_parts_of_sequences(pool: Pool, context: int, tensor: int, groups: int) -> None:
    """Keys and values are sent for at least as many heads as there are ranks."""
    layout, head = Layout(context * tensor, tensor, context=context), 32 // 8
    key_size = max(groups, context) * head
    expected = context_traffic(layout, tokens=TOKENS, query_size=32, key_size=key_size, width=4)
    for found in pool.run(sent_in_attention, context, tensor, groups, ranks=context * tensor):
        assert found == expected


def sent_to_stages(sequence: bool) -> int:
    """Job: what this rank sends to other stages in a step of two micro batches."""
    sent = 0
    send = StageLinks._send

    def counting(self: StageLinks, tensor: Tensor, link: Any) -> None:
        nonlocal sent
        sent += tensor.numel() * tensor.element_size()
        send(self, tensor, link)

    StageLinks._send = counting  # type: ignore[method-assign]
    tensor = 2 if sequence else 1
    layout = {"pipeline": 2, "tensor": tensor, "sequence": sequence}
    trainer = Trainer(small_run(model__num_layers=2, train__global_batch_size=2, parallel=layout))
    trainer.step()
    trainer.release()
    return sent


@pytest.mark.parametrize("sequence", [False, True])
def test_pipeline_stages(pool: Pool, sequence: bool) -> None:
    """The hidden states, or their gradient, of both micro batches."""
    tensor = 2 if sequence else 1
    expected = 2 * 32 * 32 * 4 // (tensor if sequence else 1)
    assert pool.run(sent_to_stages, sequence, ranks=2 * tensor) == [expected] * (2 * tensor)


def send_dense(tensor: int) -> list[float]:
    """Job: what a dense model's blocks send beyond one block less, without and with sequence parallelism."""
    found: list[float] = []
    for sequence in (False, True):
        sent = []
        for blocks in (1, 2):
            config = small_run(model__num_layers=blocks, model__num_attention_heads=4, moe={})
            config.parallel = ParallelConfig(tensor=tensor, sequence=sequence)
            launch.start(launch.find_world(), timeout_minutes=1)
            start_groups(Layout(tensor, tensor), timeout_minutes=1)
            model = build_model(config, 64, MoELayer, DEFAULT_KERNELS)  # type: ignore[arg-type] # no block is MoE
            tokens_BS = torch.arange(TOKENS)[None, :]
            with counted_bytes() as counted:
                model(tokens_BS, tokens_BS, tokens_BS).sum().backward()
            sent.append(sum(counted.values()))
        found.append(sent[1] - sent[0])
    return found


def test_a_dense_block(pool: Pool) -> None:
    for found in pool.run(send_dense, 2, ranks=2):
        for sequence, sent in zip((False, True), found, strict=True):
            pair = cut_pair_traffic(Layout(2, 2), sequence=sequence, tokens=TOKENS, hidden_size=32, width=4)
            assert sent == 2 * pair


def rows_that_leave_a_node(keep: int) -> list[int]:
    """Job: rows of this rank that cross to other nodes in each transfer of a layer, forward and backward.

    Four nodes of a rank, each with a group of the experts; tokens take 4 experts of `keep` groups, 4: of all.
    """
    launch.start(launch.find_world(), timeout_minutes=1)
    layout = Layout(4, expert=4, nodes=4)
    groups = start_groups(layout, timeout_minutes=1).layer
    masks = [{"name": "group_limit", "num_groups": 4, "keep": keep, "score": "sum"}]
    router = {"masks": masks if keep < 4 else [], "selector": {"name": "top_k", "k": 4}}
    config = small_run(moe__num_experts=16, moe__router=router, moe__num_shared_experts=0)
    shape = LayerShape(HIDDEN, FFN, 1, "swiglu", 0.1, 0.1, seed=1)
    layer = MoELayer(config.moe, shape, StepContext(), groups)
    found, real = [], Transfer.begin

    def begin(self: Transfer, rows: Tensor, sent: list[int], received: list[int]) -> None:
        if rows.dim() == 2:  # not the experts and weights of pairs
            found.append(sum(sent) - sent[dist.get_rank()])
        real(self, rows, sent, received)

    generator = torch.Generator().manual_seed(dist.get_rank())
    Transfer.begin = begin  # type: ignore[method-assign]
    try:
        hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
        layer(hidden_TH).sum().backward()
    finally:
        Transfer.begin = real  # type: ignore[method-assign]
    return found


def test_a_token_limited_to_two_groups_leaves_its_node_at_most_twice(pool: Pool) -> None:
    """To the experts and back, in forward and in backward; without a limit more rows cross."""
    limited, free = (pool.run(rows_that_leave_a_node, keep, ranks=4) for keep in (2, 4))
    out, back, gradient_out, gradient_back = (sum(of_rank) for of_rank in zip(*limited, strict=True))
    assert out == back == gradient_out == gradient_back
    assert all(rank[0] <= 2 * TOKENS and rank[2] >= 0 for rank in limited)
    assert 0 < out <= 2 * 4 * TOKENS < sum(rank[0] for rank in free)
