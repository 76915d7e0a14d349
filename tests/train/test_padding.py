"""Padding changes nothing: no loss, no load, no gradient, whatever the router, the losses and its length."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.data.batches import Batch, pair_batch, positions
from megamoe.moe.context import MicroBatch, Padding, StepContext
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import train_step
from tests.support.tiny import VOCABULARY, tiny, tiny_engine

GENERATOR = torch.Generator().manual_seed(3)
PAIRS = [
    {
        "source": torch.randint(VOCABULARY, (source,), generator=GENERATOR),
        "target": torch.randint(VOCABULARY, (target,), generator=GENERATOR),
    }
    for source, target in ((5, 3), (2, 6), (6, 1), (1, 2))
]
STACKS = {
    "encoder": ("model.architecture=encoder", "train.objective=masked", "moe.layers={at: [1, 2]}"),
    "both": (
        "model.architecture=encoder_decoder",
        "train.objective=span_corruption",
        "moe.layers={encoder: {at: [2]}, decoder: {at: [1], insert_after: [2]}}",
    ),
}
ROUTERS = {
    "capacity": (
        "moe.router={scorer: {name: linear, jitter: 0.1}, selector: {name: top_k, k: 2}, "
        "capacity: {name: per_expert, factor: 0.7}}",
        "moe.losses={switch_balance: 0.1, z_loss: 0.1}",
        "moe.expert_output_dropout=0.1",
    ),
    "sequences": (
        "moe.router={scorer: {name: noisy}}",
        "moe.losses={switch_balance: {weight: 0.1, scope: sequence}, importance: 0.1}",
        "moe.num_shared_experts=1",
    ),
    "devices": (
        "moe.router={selector: {name: top_k, k: 2}}",
        "moe.losses={device_balance: {weight: 0.1, num_groups: 2}}",
    ),
    "expert_choice": ("moe.router={selector: {name: expert_choice}}",),
    "hash": ("moe.router=hash",),
}


def longer(batch: Batch, by: int) -> Batch:
    """Fill up both sides further, with other ids than before."""

    def filled(tensor_BS: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(tensor_BS, (0, by), value=value)

    assert batch.lengths_B is not None
    tokens_BS = filled(batch.tokens_BS, 11)
    changes: dict[str, Any] = {
        "tokens_BS": tokens_BS,
        "labels_BS": filled(batch.labels_BS, 12),
        "position_ids_BS": positions(batch.lengths_B, tokens_BS.shape[1]),
        "loss_mask_BS": filled(batch.loss_mask_BS, 0),
    }
    if batch.source_BL is not None:
        changes["source_BL"] = filled(batch.source_BL, 13)
    return replace(batch, **changes)


def batches(stack: str) -> list[Batch]:
    made = [pair_batch(PAIRS[:2], [0, 1], start=0), pair_batch(PAIRS[2:], [2, 3], start=0)]
    return made if stack == "both" else [replace(b, source_BL=None, source_lengths_B=None) for b in made]


def one_step(stack: str, router: str, by: int) -> dict[str, Any]:
    config = tiny(
        "moe.layers=none", "model.init_std=0.2", "model.position=learned", *STACKS[stack], *ROUTERS[router]
    )
    context = StepContext(seed=1, step=1)
    engine = tiny_engine(config, context)
    engine.train(True)
    seen: dict[str, Tensor] = {}
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(
                lambda gradient, name=name: seen.__setitem__(name, seen.get(name, 0) + gradient.clone())
            )
    record = train_step(engine, context, [longer(b, by) if by else b for b in batches(stack)], 1e-3, 0.0)
    layers = {number: vars(layer) for number, layer in record.layers.items()}
    return {"loss": record.loss, "lm_loss": record.lm_loss, "layers": layers, "gradients": seen}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("stack", STACKS)
def test_padding_changes_nothing(one_rank: None, restored_process: None, stack: str, router: str) -> None:
    expected, found = (one_step(stack, router, by) for by in (0, 2))
    for word in ("loss", "lm_loss"):
        assert found[word] == pytest.approx(expected[word], rel=1e-6)
    assert found["gradients"].keys() == expected["gradients"].keys() and expected["gradients"]
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    tokens = {1: 14, 2: 14, 3: 12, 4: 12} if stack == "both" else {1: 12, 2: 12}
    for number, layer in expected["layers"].items():
        other = found["layers"][number]
        assert int(layer["width_D"].sum()) == tokens[number]  # those that are routed
        for word in ("load_E", "wanted_E", "width_D"):
            assert torch.equal(layer[word], other[word])
        for word in ("entropy", "top_1"):
            assert other[word] == pytest.approx(layer[word], rel=1e-6)
        assert other["losses"] == pytest.approx(layer["losses"], rel=1e-6)


def test_full_sequences_take_the_same_way_as_padded_ones() -> None:
    """Ranks of ZeRO 3 must have the same autograd graph, whatever the lengths of their sequences."""
    context = StepContext()
    context.batch = micro_batch_of(pair_batch(PAIRS[:1], [0], start=0), 0)
    assert context.batch.padding is not None
    assert context.batch.source is not None and context.batch.source.padding is not None
    assert context.batch.padding.place_V.tolist() == [0, 1, 2]
    batch = replace(pair_batch(PAIRS[:1], [0], start=0), lengths_B=None, source_BL=None)
    context.batch = micro_batch_of(batch, 0)
    assert context.batch.padding is None and context.batch.source is None


def test_places_of_each_rank() -> None:
    padding = Padding.of(torch.tensor([4, 1, 2]), 4)
    assert padding.place_V.tolist() == [0, 1, 2, 3, 5, 6, 9]  # place s * 3 + b
    assert padding.bounds(2) == (0, 5, 7)
    assert [padding.own_places(rank, 2).tolist() for rank in (0, 1)] == [[0, 1, 2, 3, 5], [0, 3]]
    context = StepContext(batch=MicroBatch(padding=padding).without_padding(2))
    assert context.sequence(7, torch.device("cpu")).tolist() == [0, 1, 2, 0, 2, 0, 0]
