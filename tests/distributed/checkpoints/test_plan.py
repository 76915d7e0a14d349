"""What a run will save is planned before its first step; a weight of two pipeline stages is saved once."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megamoe.checkpoint import manager, state
from megamoe.checkpoint.planning import plan_save
from megamoe.errors import UserError
from megamoe.train.trainer import Trainer
from tests.distributed.checkpoints.test_resume_elsewhere import go_on_each, without_random
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, ds_config, small_run

# Both stages have the tied embedding, and ZeRO cuts each at its own middle: the second has two blocks.
TIED: dict[str, Any] = {
    "model__num_layers": 3,
    "model__hidden_size": 16,
    "model__vocab_size": 512,
    "model__tie_embeddings": True,
    "moe__layers": {"at": []},
    "optimizer__ema": 0.9,
    "train__global_batch_size": 4,
}
UNEQUAL: dict[str, Any] = {"parallel__blocks_per_stage": [1, 2]}
STAGES = Place(4, pipeline=2, zero=1)
STEPS = 2


def run_of(place: Place, folder: Path, name: str, source: str | None = None, **more: Any) -> dict[str, Any]:
    """A run for `go_on_each`, from its start or from the checkpoint of the run `source`."""
    run = {**TIED, **place.changes(folder), **more, "output": folder, "name": name}
    if source is not None:
        run["checkpoint__resume"] = str(checkpoint(folder, source))
    return {**run, "first": 0 if source else STEPS}


def checkpoint(folder: Path, name: str) -> Path:
    return folder / name / "checkpoints" / f"step_{STEPS:08d}"


MTP: dict[str, Any] = {"model__multi_token_prediction": {"depth": 1}}
CHANGES: dict[str, dict[str, Any]] = {
    "tied": {},
    "muon": {"optimizer__name": "muon"},
    "moments": {"optimizer__moments": "bf16"},
    "MTP": MTP,
    "untied MTP": {**MTP, "model__tie_embeddings": False},
}


@pytest.mark.full
@pytest.mark.parametrize("more", CHANGES.values(), ids=CHANGES)
def test_unequal_stages_save_a_tied_embedding_once(pool: Pool, tmp_path: Path, more: dict[str, Any]) -> None:
    """The run goes on alike after its save, resumed, and moved; as one rank does."""
    alone = run_of(Place(zero=1), tmp_path, "alone", **more)
    ((expected,),) = pool.run(go_on_each, [alone], ranks=1)
    staged = {**more, **UNEQUAL}
    runs = [
        run_of(STAGES, tmp_path, "stages", **staged),
        run_of(STAGES, tmp_path, "resumed", "stages", **staged),
        run_of(Place(4, pipeline=2, context=2, zero=1), tmp_path, "context", "resumed", **staged),
        run_of(Place(4, context=2, zero=2), tmp_path, "zero2", "context", **more),
        run_of(STAGES, tmp_path, "back", "zero2", **staged),
    ]
    for rank in pool.run(go_on_each, runs, ranks=4, timeout_s=300):
        for run, found in zip(runs, rank, strict=True):
            assert found["after"] == pytest.approx(expected["after"], rel=1e-5), run["name"]
    saved, moved = (read_tensors(checkpoint(tmp_path, name)) for name in ("stages", "back"))
    assert_same_bits(without_random(moved), without_random(saved))


def saved_and_refused(changes: dict[str, Any]) -> str:
    """Job: save a run, then the same one if both stages offer the tied embedding; return its message."""
    trainer = Trainer(small_run(**changes))
    trainer.step()
    trainer.save()
    trainer.release()
    with mock.patch.object(state, "_is_copy", lambda parameter: False), pytest.raises(UserError) as caught:
        Trainer(small_run(**{**changes, "name": "refused"}))
    return str(caught.value)


def test_chunks_that_overlap_are_refused_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    run = run_of(STAGES, tmp_path, "saved", **UNEQUAL)
    del run["first"]
    messages = pool.run(saved_and_refused, run, ranks=4)
    assert len(set(messages)) == 1 and "\n" not in messages[0]
    name = "model/model.embedding.word_embeddings.weight"
    assert f"(key:{name} has overlapping chunks)" in messages[0]
    assert messages[0].endswith("train at another layout (`parallel`) or at ZeRO stage 0")
    assert not (tmp_path / "refused").exists()
    assert name in read_tensors(tmp_path / "saved" / "checkpoints" / "step_00000001")


def plans_of_each(runs: list[dict[str, Any]]) -> list[list[int]]:
    """Job: of each run, how often a save was planned: before the first step, and with the first save."""
    found = []
    for changes in runs:
        with mock.patch.object(manager, "plan_save", wraps=plan_save) as planned:
            trainer = Trainer(small_run(**changes))
            before = planned.call_count
            trainer.step()
            trainer.save()
            found.append([before, planned.call_count])
        trainer.release()
    return found


def test_the_first_save_is_the_one_that_was_planned(pool: Pool, tmp_path: Path) -> None:
    """Shapes, dtypes and names of states that the first step makes are known before it."""
    frozen = {"optimizer__groups": [{"pattern": "embedding", "lr_scale": 0.5}]}
    muon: dict[str, Any] = {"optimizer__name": "muon"}
    runs: dict[str, dict[str, Any]] = {
        "zero0_bf16": {"optimizer__ema": 0.9},
        "zero0_fp32": muon,
        "zero1_bf16": {"optimizer__moments": "bf16", **frozen},
        "zero3_fp32": {**muon, "parallel__expert": 2},
        "zero2_bf16_offload": {},
    }
    changes = [
        {"output": tmp_path, "name": file, "parallel__deepspeed": ds_config(file), **run}
        for file, run in runs.items()
    ]
    for rank in pool.run(plans_of_each, changes, ranks=2):
        assert rank == [[1, 1]] * len(runs)
