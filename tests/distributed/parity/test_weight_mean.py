"""The mean of the weights at every ZeRO stage and layout is that of one rank, and goes on after a resume."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.checkpoint.format.reader import MEAN, CheckpointReader
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, small_run

HALF, STEPS = 1, 3
RUN: dict[str, Any] = {
    "optimizer__ema": 0.75,
    "optimizer__lr": 1e-2,
    "optimizer__eps": 1e-3,  # with less, AdamW makes whole steps of gradients that are 0 but for rounding
    "checkpoint__keep": 9,
    "evaluation__batches": 0,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 2": {"expert": 2},
    "TP 2": {"tensor": 2, "sequence": True, "expert_tensor": 2},
}
PLACES = [Place(2, zero=zero, **layout) for layout in LAYOUTS.values() for zero in range(4)]


def train_each(runs: list[dict[str, Any]]) -> None:
    """Job: runs to step STEPS, one after the other, with a checkpoint of each step that `save_at` names."""
    for changes in runs:
        save_at = changes.pop("save_at")
        trainer = Trainer(small_run(**changes))
        while trainer.progress.step < STEPS:
            trainer.step()
            if trainer.progress.step in save_at:
                trainer.save()
        trainer.release()
        del trainer
        gc.collect()  # an engine and its parameters refer to each other


def checkpoint(folder: Path, name: str, step: int) -> Path:
    return folder / name / "checkpoints" / f"step_{step:08d}"


def means(folder: Path, name: str, step: int) -> dict[str, Tensor]:
    with CheckpointReader(checkpoint(folder, name, step)) as reader:
        return {key: reader.tensor(key) for key in reader.names(MEAN)}


@pytest.mark.full
def test_at_every_stage(pool: Pool, tmp_path: Path) -> None:
    common = {**RUN, "output": str(tmp_path)}
    alone = {**common, **Place().changes(tmp_path), "name": "alone", "save_at": [HALF, STEPS]}
    pool.run(train_each, [alone], ranks=1)
    runs = []
    for number, place in enumerate(PLACES):
        at_layout = {**common, **place.changes(tmp_path)}
        runs.append({**at_layout, "name": f"whole_{number}", "save_at": [HALF, STEPS]})
        for source, name in ((f"whole_{number}", "resumed"), ("alone", "moved")):
            resume = str(checkpoint(tmp_path, source, HALF))
            more = {"name": f"{name}_{number}", "checkpoint__resume": resume, "save_at": [STEPS]}
            runs.append({**at_layout, **more})
    pool.run(train_each, runs, ranks=2, timeout_s=1200)
    for step in (HALF, STEPS):
        expected = means(tmp_path, "alone", step)
        assert any("experts" in name for name in expected) and any("embedding" in name for name in expected)
        for number, place in enumerate(PLACES):
            names = [f"whole_{number}"] + [f"moved_{number}"] * (step == STEPS)
            for name in names:
                assert_close(means(tmp_path, name, step), expected, f"{place}, {name}, step {step}")
    for number, place in enumerate(PLACES):
        whole, resumed = (means(tmp_path, f"{name}_{number}", STEPS) for name in ("whole", "resumed"))
        assert whole.keys() == resumed.keys()
        for key, mean in whole.items():
            assert torch.equal(mean, resumed[key]), f"{place}: {key} after a resume"


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    assert found.keys() == expected.keys(), name
    for key, mean in expected.items():
        difference = float((found[key].double() - mean.double()).abs().max())
        assert difference < 1e-5, f"{name}: {key}: {difference}"
