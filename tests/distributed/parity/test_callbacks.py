"""A callback that raises on one rank ends all of them alike, and what was saved before stays."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe import registry
from megamoe.errors import UserError
from megamoe.train.callbacks import Callback, TrainingRun
from megamoe.train.loop import Loop
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run


def message(**changes: Any) -> str:
    """Job: return the message of a run whose callback fails on rank 1 in the second step."""
    parts = registry._parts["callback"]

    class Failing(Callback):
        @dataclass
        class Config:
            pass

        def on_step_end(self, trainer: TrainingRun, metrics: Any) -> None:
            if trainer.progress.step == 2 and trainer.world.rank == 1:
                raise ValueError("no such table")

    Failing.__module__ = "a_plugin"  # of ours it would be a defect, with a traceback
    registry.register("callback", "failing")(Failing)
    try:
        # A rank may trace itself alone: the profiler, a callback of ours, is no collective.
        traced = {"start_step": 1, "num_steps": 1} if os.environ["RANK"] == "1" else {}
        config = small_run(**changes, train__callbacks=["failing"], train__profiler=traced)
        trainer = Trainer(config)
        try:
            Loop(trainer).run()
        except UserError as error:
            return str(error)
        finally:
            trainer.close()
    finally:
        del parts["failing"]
    return ""


def test_all_ranks_end_with_the_same_line(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(message, output=str(tmp_path), checkpoint__every=1, train__steps=4, ranks=2)
    line = "train.callbacks: on_step_end of the callback 'failing' failed: ValueError: no such table"
    assert found == [line, line]
    assert [path.name for path in tmp_path.glob("*/checkpoints/step_*")] == ["step_00000001"]
    assert [path.name for path in tmp_path.glob("*/profile/*")] == ["rank_00001.json"]
