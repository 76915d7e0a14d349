"""Kill -9 of a random rank at a random moment, again and again: the run ends as if nothing had happened."""

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from megamoe.checkpoint import manager, writer
from megamoe.checkpoint.format import files
from megamoe.train.loop import train
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.ranks.pool import Pool, RankError
from tests.support.ranks.runs import ds_config, small_run

RUN: dict[str, Any] = {
    "parallel__expert": 2,
    "parallel__deepspeed": ds_config("zero1_fp32"),
    "model__hidden_dropout": 0.1,
    "moe__losses": {"switch_balance": 0.1, "z_loss": 0.01},
    "optimizer__schedule": "cosine",
    "train__global_batch_size": 4,
    "checkpoint": {"every": 4, "resume": "auto"},
    "evaluation__batches": 0,
    "log": {"report": False},
}
STAGED: dict[str, Any] = {**RUN, "parallel__pipeline": 2}  # on four ranks
# Where a save can be cut: before or after each of its operations on the disk.
MOMENTS = [
    (manager.Checkpoints, "_make_folder"),
    (writer.Staging, "copy"),
    (writer, "save_file"),
    (writer, "sync"),
    (writer, "sha256"),
    (files, "replace_file"),
    (manager.os, "replace"),
    (manager, "replace_file"),
    (manager, "remove"),
]


def train_to_the_end(
    output: Path,
    run: dict[str, Any],
    steps: int,
    plan: tuple[int, float, int | None, int, bool] | None = None,
) -> None:
    """Job: the run, or what is left of it. plan: (rank, seconds, moment, call, after) of its death.

    By the clock, so many seconds after the first step; or, with a moment, at that call of it.
    """
    if plan is not None and plan[0] == int(os.environ["RANK"]):
        _, seconds, moment, call, after = plan
        if moment is None:
            _die_by_the_clock(seconds)
        else:
            _die_at_a_call(*MOMENTS[moment], call, after)
    train(small_run(output, train__steps=steps, **run))


def _die(*unused: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_by_the_clock(seconds: float) -> None:
    from megamoe.train import trainer

    step = trainer.train_step

    def first_step(*args: Any, **kwargs: Any) -> Any:
        trainer.train_step = step
        threading.Timer(seconds, _die).start()
        return step(*args, **kwargs)

    trainer.train_step = first_step


def _die_at_a_call(where: Any, name: str, call: int, after: bool) -> None:
    original, calls = getattr(where, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            _die()
        result = original(*args, **kwargs)
        if calls[0] == call:
            _die()
        return result

    setattr(where, name, counted)


def kill_and_restart(
    pool: Pool, output: Path, run: dict[str, Any], ranks: int, steps: int, kills: int, seed: int
) -> int:
    """Until the run has ended; returns how many kills found it alive."""
    generator, killed = random.Random(seed), 0
    for number in range(kills):
        moment = generator.randrange(len(MOMENTS)) if number % 2 else None
        by_first_only = (manager, manager.os, files, manager.Checkpoints)
        is_of_first = moment is not None and MOMENTS[moment][0] in by_first_only
        rank = 0 if is_of_first else generator.randrange(ranks)
        plan = (rank, generator.uniform(0, 0.4), moment, generator.randint(1, 4), generator.random() < 0.5)
        try:
            pool.run(train_to_the_end, output, run, steps, plan, ranks=ranks)
        except RankError as error:
            assert "exit code -9" in str(error), error
            killed += 1
    pool.run(train_to_the_end, output, run, steps, ranks=ranks)
    return killed


def recorded(output: Path) -> list[tuple[Any, ...]]:
    """The results of each step of the whole run."""
    lines = (output / "small" / "metrics.jsonl").read_text().splitlines()
    words = ("step", "tokens", "train/lm_loss", "train/loss", "train/grad_norm", "moe/layer_02/load")
    return [tuple(json.loads(line).get(word) for word in words) for line in lines]


@pytest.mark.parametrize(
    ("run", "ranks", "kills", "steps"),
    [
        pytest.param(RUN, 2, 2, 16, id="few"),
        pytest.param(RUN, 2, 50, 200, marks=pytest.mark.full, id="many"),
        pytest.param(STAGED, 4, 50, 200, marks=pytest.mark.full, id="stages"),
    ],
)
def test_a_run_that_is_killed_ends_as_one_that_is_not(
    pool: Pool, tmp_path: Path, run: dict[str, Any], ranks: int, kills: int, steps: int
) -> None:
    pool.run(train_to_the_end, tmp_path / "whole", run, steps, ranks=ranks)
    killed = kill_and_restart(pool, tmp_path / "killed", run, ranks, steps, kills, seed=5)
    assert killed >= 0.6 * kills
    expected, found = recorded(tmp_path / "whole"), recorded(tmp_path / "killed")
    assert [line[0] for line in found] == list(range(1, steps + 1))
    assert found == expected
    last = Path("small", "checkpoints", f"step_{steps:08d}")  # weights, moments, random states
    assert_same_bits(read_tensors(tmp_path / "killed" / last), read_tensors(tmp_path / "whole" / last))
