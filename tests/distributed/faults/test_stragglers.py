"""A rank that sleeps in its data or router is named; waits and the experts' load are not counted."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megamoe import registry
from megamoe.moe.dispatch.direct import DirectDispatch
from megamoe.moe.router import Router
from megamoe.resilience import stragglers
from megamoe.train.callbacks import Callback
from megamoe.train.loop import Loop
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

STEPS = 10  # the first window of 2 has the start's compilations


class Idle(Callback):
    """Does nothing."""

    @dataclass
    class Config:
        pass


def metrics_of(where: Any, sleeper: int | None, **changes: Any) -> None:
    """Job: train; the sleeper sleeps in each call of `where`, a class and the name of its method."""
    registry._parts["callback"].setdefault("idle", Idle)
    trainer = Trainer(small_run(**changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "STEPS", 2)
        if trainer.world.rank == sleeper:
            owner, name = where
            original = getattr(owner, name)

            def slow(*arguments: Any, **options: Any) -> Any:
                time.sleep(1.0)
                return original(*arguments, **options)

            patch.setattr(owner, name, slow)
        try:
            Loop(trainer).run()
        finally:
            trainer.close()


def rows_of(
    pool: Pool, folder: Path, where: Any, sleeper: int | None, **changes: Any
) -> list[dict[str, Any]]:
    options: dict[str, Any] = {
        "output": str(folder),
        "train__steps": STEPS,
        "parallel__expert": 2,
        "log": {"straggler_factor": 2.0, "report": False},
    }
    pool.run(metrics_of, where, sleeper, ranks=2, **{**options, **changes})
    return [json.loads(line) for line in next(folder.glob("*/metrics.jsonl")).read_text().splitlines()]


@pytest.mark.full
def test_a_rank_that_sleeps_before_it_sends_is_named(pool: Pool, tmp_path: Path) -> None:
    rows = rows_of(pool, tmp_path, (Router, "forward"), 1)
    assert rows[-1]["perf/stragglers"] == 1 and rows[-1]["perf/slowest_rank"] == 1
    # The other rank waits for it, and its own time is not longer for that.
    assert rows[-1]["perf/slowest_own_s"] > 1.0 > rows[-1]["perf/own_s"]
    assert json.loads(next(tmp_path.glob("*/stragglers.json")).read_text())["ranks"][0]["rank"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "sleeper", "named"),
    [((Trainer, "_take"), 1, 1), ((Trainer, "_take"), None, 0), ((DirectDispatch, "start"), 1, 0)],
)
def test_data_is_own_time_and_exchanges_are_not(
    where: Any, sleeper: int | None, named: int, pool: Pool, tmp_path: Path
) -> None:
    assert rows_of(pool, tmp_path, where, sleeper)[-1]["perf/stragglers"] == named


@pytest.mark.full
def test_the_first_ranks_record_is_not_the_others_time(pool: Pool, tmp_path: Path) -> None:
    """They wait for it where callbacks agree that none has failed."""
    row = rows_of(pool, tmp_path, (Loop, "_record"), 0, train__callbacks=["idle"])[-1]
    assert row["perf/stragglers"] == 0 and row["perf/slowest_own_s"] < 0.9


@pytest.mark.full
def test_off(pool: Pool, tmp_path: Path) -> None:
    row = rows_of(pool, tmp_path, (Router, "forward"), 1, log={"straggler_factor": None, "report": False})[-1]
    assert not {key for key in row if "straggler" in key or "own_s" in key}
