"""At ZeRO 3 a start holds a rank's slices and one part of the model, with the weights of one rank's build."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megamoe.parallel.chunks import chunk_view, local_chunks_of
from megamoe.parallel.placements import placements
from megamoe.parallel.zero.partition import Partition
from megamoe.train import start_model
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_config, ds_variant, small_run

DEEP: dict[str, Any] = {
    "model__num_layers": 12,
    "model__hidden_size": 64,
    "model__num_attention_heads": 4,
    "moe__layers": {"every": 1},
    "moe__num_experts": 4,
    "moe__expert_ffn_hidden_size": 64,
    "train__global_batch_size": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "encoder": {"model__architecture": "encoder", "train__objective": {"name": "masked"}},
    "encoder_decoder": {
        "model__architecture": "encoder_decoder",
        "data__document_aware": False,
        "moe__layers": {"encoder": {"at": [2]}, "decoder": {"at": [1]}},
        "train__objective": {"name": "span_corruption"},
    },
    "sinusoidal": {"model__position": "sinusoidal"},
}
WEIGHTS: dict[str, Any] = {"train__global_batch_size": 4, "moe__layers": {"at": [1], "insert_after": [2]}}
# (ranks, parallel): with the experts' copies on one, two and four ranks
LAYOUTS = [
    (2, {"expert": 2}),
    (4, {"expert": 2}),
    (4, {"expert": 1}),
    (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
]


def held_while_built(**changes: Any) -> dict[str, int]:
    """Job: the most bytes of tensors beside what is there before the start, until all is cut, and of what."""
    found: list[int] = []

    class Watched(Partition):
        def __call__(self, module: nn.Module) -> None:
            found.append(_live_bytes())
            super().__call__(module)
            found.append(_live_bytes())

    before = _live_bytes()
    with mock.patch.object(start_model, "Partition", Watched):
        trainer = Trainer(small_run(**changes))
    trainer.release()
    model = trainer.model
    sizes = [4 * parameter.ds_numel for parameter in model.parameters()]  # type: ignore[attr-defined]
    blocks = [
        sum(4 * parameter.ds_numel for parameter in block.parameters())  # type: ignore[attr-defined]
        for stack in model.stacks()
        for block in stack
    ]
    slices = sum(p.ds_tensor.nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return {"most": max(found) - before, "whole": sum(sizes), "block": max(blocks), "slices": slices}


def _live_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("file", ["zero3_bf16", pytest.param("zero3_fp32", marks=pytest.mark.full)])
def test_one_block_is_whole_at_a_time(pool: Pool, file: str) -> None:
    for held in pool.run(held_while_built, **DEEP, parallel__deepspeed=ds_config(file), ranks=2):
        allowed = held["slices"] + 1.2 * held["block"]  # and rotary frequencies, masks, ...
        assert held["most"] < allowed < 0.8 * held["whole"]


def weights_at_start(**changes: Any) -> dict[str, list[tuple[Any, Tensor]]]:
    """Job: each weight of this rank, before the first step, in chunks of the weight of one rank."""
    trainer = Trainer(small_run(**changes))
    trainer.release()
    model = trainer.model
    found = placements(model, trainer.layout, trainer.world.rank)
    with trainer.engine.gathered(model.parameters()):
        return {
            name: [
                (local.chunk, local.tensor.clone())
                for local in local_chunks_of(name, found[name], parameter.detach().view(-1))
            ]
            for name, parameter in model.named_parameters()
        }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(*case, marks=() if case == LAYOUTS[0] else pytest.mark.full, id=str(case))
        for case in LAYOUTS
    ],
)
def test_weights_are_those_of_one_rank(
    pool: Pool, tmp_path: Path, ranks: int, parallel: dict[str, int], tied: bool
) -> None:
    _assert_those_of_one_rank(pool, tmp_path, ranks, parallel, {**WEIGHTS, "model__tie_embeddings": tied})


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_of_every_architecture(pool: Pool, tmp_path: Path, name: str) -> None:
    _assert_those_of_one_rank(pool, tmp_path, 2, {"expert": 2}, {**WEIGHTS, **ARCHITECTURES[name]})


def _assert_those_of_one_rank(
    pool: Pool, folder: Path, ranks: int, parallel: dict[str, int], run: dict[str, Any]
) -> None:
    (whole,) = pool.run(weights_at_start, **run, ranks=1)
    path = ds_variant(folder, "zero3_fp32", zero_optimization=CUT_ALL)
    for found in pool.run(weights_at_start, **run, parallel={**parallel, "deepspeed": path}, ranks=ranks):
        assert found.keys() == whole.keys()
        for name, chunks in found.items():
            ((_, expected),) = whole[name]
            assert chunks and all(torch.equal(chunk_view(expected, at), part) for at, part in chunks), name
