"""Muon's momentum in checkpoints: at any layout, bit for bit at the same one, and to and from AdamW."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamoe.train.trainer import Trainer
from tests.distributed.checkpoints.test_moves import (
    AFTER,
    ALONE,
    BOTH,
    EP2,
    LAYOUTS,
    RUN,
    TP2,
    Move,
    checkpoint,
    name_of,
    run_moves,
    save_and_go_on,
)
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import WORDS, Place, ds_file, run_each, small_run

MUON: dict[str, Any] = {**RUN, "optimizer__name": "muon", "optimizer__eps": 1e-3}
QUICK: list[Move] = [(replace(TP2, zero=3), replace(EP2, zero=1))]
OTHERS: list[Move] = [
    (replace(source, zero=stage), replace(target, zero=3 - stage))
    for stage, (source, target) in enumerate([(BOTH, ALONE), (ALONE, BOTH), (EP2, ALONE), (EP2, BOTH)])
]


@pytest.mark.parametrize(
    "moves", [QUICK, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["quick", "others"]
)
def test_states_move_between_layouts(pool: Pool, tmp_path: Path, moves: list[Move]) -> None:
    run_moves(pool, tmp_path, moves, MUON)


def goes_on_bit_for_bit(pool: Pool, folder: Path, places: list[Place], precision: str) -> None:
    files = [ds_file(folder, f"zero{place.zero}_{precision}") for place in places]
    runs = [
        {**MUON, **at.changes(folder), "parallel__deepspeed": file, "output": folder, "name": name_of(at)}
        for at, file in zip(places, files, strict=True)
    ]
    ranks = places[0].ranks
    went_on = pool.run(save_and_go_on, runs, ranks=ranks, timeout_s=600)
    resumed = [
        {**run, "steps": AFTER, "checkpoint__resume": checkpoint(place, folder)}
        for run, place in zip(runs, places, strict=True)
    ]
    found = pool.run(run_each, resumed, ranks=ranks, timeout_s=600)
    for rank in range(ranks):
        for place, expected, again in zip(places, went_on[rank], found[rank], strict=True):
            for word in WORDS:
                assert again[word] == expected[word], f"{place}: {word}"


@pytest.mark.full
def test_a_resumed_run_is_bit_identical(pool: Pool, tmp_path: Path) -> None:
    goes_on_bit_for_bit(pool, tmp_path, [replace(EP2, zero=stage) for stage in (0, 1, 2, 3)], "bf16")


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_resumed_run_is_bit_identical(pool: Pool, tmp_path: Path, layout: Place) -> None:
    goes_on_bit_for_bit(pool, tmp_path, [replace(layout, zero=stage) for stage in (0, 1, 2, 3)], "fp32")


def change_algorithms(folder: str) -> list[tuple[set[str], list[str]]]:
    """Job: two steps each of AdamW, Muon, AdamW; of each, what has moments at its start, and lines."""
    found = []
    for name in ("adamw", "muon", "adamw"):
        trainer = Trainer(small_run(folder, **RUN, optimizer__name=name, checkpoint__resume="auto"))
        (shard,) = trainer.engine.optimizer_shards()
        names = {id(parameter): name for name, parameter in trainer.engine.model.named_parameters()}
        state = trainer.engine.inner_optimizer.state
        begun = {names[id(each.parameter)] for each in shard.fragments if state.get(each.tensor)}
        found.append((begun, trainer.saver.changes))
        for _ in range(2):
            trainer.step()
        trainer.save()
        trainer.release()
    return found


def test_between_adamw_and_muon_the_momentum_of_matrices_starts_at_zero(pool: Pool, tmp_path: Path) -> None:
    ((first, to_muon, to_adamw),) = pool.run(change_algorithms, str(tmp_path), ranks=1)
    assert first == (set(), [])
    for begun, changes in (to_muon, to_adamw):
        assert any("momentum starts at 0" in line for line in changes)
        assert "model.embedding.word_embeddings.weight" in begun
        assert "model.decoder.layers.1.mlp.layer.router.scorer.weight" in begun
        assert not [name for name in begun if "linear_qkv.weight" in name or "experts." in name]
