"""Facts of a run, the steps that it takes to a loss, and numbers at a path."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.lab.measures import FACTS, _at, _steps_until, crossing
from megamoe.apps.lab.study import Measure
from megamoe.apps.lab.tasks import Task
from megamoe.apps.report.run_statistics import compute_statistics

NEW = [{"step": step, "tokens": 100 * step, "perf/gflops_per_token": 2e-6 * step} for step in (1, 2, 3)]


def fact(name: str, rows: list[dict[str, Any]]) -> Any:
    statistics = compute_statistics(rows)
    run = SimpleNamespace(rows=rows, summary={}, statistics=statistics)
    return FACTS[name](run, None)


def test_flops_are_those_that_the_run_has_recorded() -> None:
    assert fact("flops_per_token", NEW) == pytest.approx(4e3)
    assert fact("training_flops", NEW) == pytest.approx(4e3 * 300)
    assert fact("flops_per_token", [{"step": 1}]) is None


def test_steps_until_another_run_is_reached(tmp_path: Path) -> None:
    """The last step of a run that is never so low; no number while the other run has none."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 40, "val/lm_loss": 2.0}) + "\n")
    measure, goal = Measure(metric="val/lm_loss", until="goal"), Task("goal", tmp_path, (), "goal")

    def steps(losses: list[float], done: bool = True) -> float | None:
        run = SimpleNamespace(
            rows=[{"step": 10 * (at + 1), "val/lm_loss": loss} for at, loss in enumerate(losses)]
        )
        return _steps_until(measure, run, SimpleNamespace(is_done=lambda task: done), goal)  # type: ignore[arg-type]

    assert [steps([3.0, 2.0, 1.5]), steps([4.0, 3.0, 2.1])] == [20.0, 30.0]
    assert steps([3.0, 2.0], done=False) is None and steps([]) is None


def test_a_curve_crosses_another_where_the_smoothed_difference_stays_negative() -> None:
    """Differences of 1 until step 20 and -1 from 21 on, but 27 at 30: the mean of 10 is negative from 26 to
    29 and from 40 on.
    """
    others = [(step, 3.0) for step in range(1, 61)]
    curve = [(step, 4.0 if step < 21 else 30.0 if step == 30 else 2.0) for step in range(1, 61)]
    assert crossing(curve, others) == 40
    assert crossing(curve[:37], others) is None and crossing([], others) is None
    assert crossing(others, curve) is None and crossing([(1, 2.0)], [(1, 3.0), (2, 0.0)]) == 1


def test_what_is_taken_of_the_numbers_at_a_path() -> None:
    content = {"load": {"3": {"training": [0.1, 0.3, 0.2, 0.4]}}}

    def taken(path: str, take: Any = None) -> float | None:
        return _at(content, Measure(stage="routing", path=path, take=take), "measures.load")

    assert taken("load/*/training/0:3") == pytest.approx(0.2)
    assert [taken("load/3/training/0:3", take) for take in ("lowest", "highest", "last")] == [0.1, 0.3, 0.2]
    assert taken("load/3/training/4:8") is None
