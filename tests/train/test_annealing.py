"""The recipe of docs/run/runs.md: a decay of the learning rate from a checkpoint of the stable phase."""

import json
from pathlib import Path

import pytest

from megamoe.train.loop import train
from tests.support.tiny import restored_process, tiny

STABLE = ("optimizer.schedule=wsd", "optimizer.warmup_steps=2", "optimizer.lr=0.01", "optimizer.min_lr=0")


def rates_and_losses(folder: Path) -> dict[int, tuple[float, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: (row["train/lr"], row["train/lm_loss"]) for row in lines if "train/lr" in row}


def test_a_decay_from_the_stable_phase_is_that_of_a_shorter_run(tmp_path: Path) -> None:
    """To the bit: from the checkpoint of step 4 of a longer run, and in a run of 8 steps from its start."""
    common = (*STABLE, f"output={tmp_path}")
    anneal = ("train.steps=8", "optimizer.wsd_decay_steps=4")
    with restored_process():
        stops = ("train.exit_after_steps=6", "checkpoint.every=2", "checkpoint.keep=9")
        train(tiny("name=stable", *common, "train.steps=12", "optimizer.wsd_decay_steps=2", *stops))
        start = f"checkpoint.resume={tmp_path / 'stable' / 'checkpoints' / 'step_00000004'}"
        train(tiny("name=annealed", *common, *anneal, start))
        train(tiny("name=short", *common, *anneal))
    stable, annealed, short = (rates_and_losses(tmp_path / name) for name in ("stable", "annealed", "short"))
    assert {lr for step, (lr, _) in stable.items() if step > 2} == {0.01}
    assert [lr for lr, _ in annealed.values()] == pytest.approx([0.0075, 0.005, 0.0025, 0.0])
    assert annealed == {step: short[step] for step in (5, 6, 7, 8)}
    assert stable[5] != annealed[5]
