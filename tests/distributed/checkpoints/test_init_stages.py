"""A run that starts from another run's weights, with stages and parts of sequences, as on one rank."""

import gc
from pathlib import Path
from typing import Any

import pytest

from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import assert_as_alone, recorded_steps, run_each, small_run

MODEL: dict[str, Any] = {
    "model__num_layers": 4,
    "model__num_attention_heads": 4,
    "model__ffn_hidden_size": 128,
    "train__global_batch_size": 4,
}
MOE = {**MODEL, "moe__layers": {"at": [1, 4]}, "moe__num_experts": 4, "moe__expert_ffn_hidden_size": 32}
LAYOUTS: list[dict[str, Any]] = [
    {"parallel__pipeline": 2, "parallel__pipeline_chunks": 2},
    {"parallel__context": 2, "parallel__expert": 2},
]


def save_dense_and_moe(folder: Path) -> list[str]:
    """Job: train and save a dense model and one with experts; return the paths of their checkpoints."""
    paths = []
    for name, model in (("dense", {**MODEL, "moe__layers": {"at": []}}), ("moe", MOE)):
        trainer = Trainer(small_run(folder, name=name, **model))
        recorded_steps(trainer, 1)
        trainer.save()
        trainer.saver.checkpoints.close()
        paths.append(str(folder / name / "checkpoints/step_00000001"))
        del trainer
        gc.collect()
    return paths


@pytest.fixture(scope="module")
def inits(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return sections `checkpoint.init`: of a dense model, cut into experts, and of the same model."""
    ((dense, same),) = pool.run(save_dense_and_moe, tmp_path_factory.mktemp("init"), ranks=1)
    return [{"path": dense, "experts": "cut"}, {"path": same}]


@pytest.mark.full
def test_weights_of_another_run(pool: Pool, inits: list[dict[str, Any]]) -> None:
    drawn = {**MOE, "seed": 7, "steps": 2}
    runs = [{**drawn, "checkpoint__init": init} for init in inits]
    ((*alone, other),) = pool.run(run_each, [*runs, drawn], ranks=1)
    assert other["lm_loss"] not in [each["lm_loss"] for each in alone]
    staged = [{**run, **layout} for layout in LAYOUTS for run in runs]
    found = pool.run(run_each, staged, ranks=2)
    for place, expected in enumerate(alone * len(LAYOUTS)):
        assert_as_alone([rank[place] for rank in found], expected, str(staged[place]))
