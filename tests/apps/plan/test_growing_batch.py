"""The hours of a run whose batch grows: each step by its own number of micro batches."""

from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.plan.figures import Figures
from megamoe.apps.plan.plan import Plan
from megamoe.apps.plan.plan_page import _time
from megamoe.optim.schedule import BatchSchedule

# A step of four micro batches, each of 1 s forward and 2 s backward, and 3 s of the optimizer.
NUMBERS = {"forward": 1.0, "backward": 2.0, "backward_seconds": 0.0, "overlapped": 0.0, "tokens": 64.0}
NUMBERS |= {"optimistic": 10.0, "pessimistic": 20.0, "model_flops": 0.0, "flops": 0.0}


def planned(schedule: BatchSchedule, pipeline: Any = None) -> Plan:
    figures = Figures(NUMBERS, {}, {"experts": 12.0, "optimizer": 3.0}, {}, {}, {}, {})
    run: Any = SimpleNamespace(
        schedule=schedule, steps=7, plan=SimpleNamespace(layout=SimpleNamespace(data=2))
    )
    cluster: Any = SimpleNamespace(gpu=SimpleNamespace(bf16=1e12), ranks=2)
    rest: Any = None
    return Plan(rest, run, cluster, 1.0, rest, 4, figures, [], [2], 2, pipeline)


def test_steps_of_a_smaller_batch_take_less() -> None:
    """By hand: micro batches of 2 samples; batches of 4 up to 12 samples, then of 8."""
    plan = planned(BatchSchedule(final=8, unit=2, start=4, increment=4, ramp_samples=12))
    assert [*plan.run.schedule.spans(7)] == [(4, 3), (8, 4)]
    assert plan.run_seconds == pytest.approx(3 * (2 * 3 + 3) + 4 * (4 * 3 + 3))
    assert _time(plan)[-1].startswith("  7 steps of 4 to 8 sequences: ")
    same = planned(BatchSchedule(final=8, unit=2, start=8, increment=1, ramp_samples=0))
    assert same.run_seconds == 7 * 15 and _time(same)[-1].startswith("  7 steps: ")


def test_with_stages_the_slowest_decides() -> None:
    slow = Figures({**NUMBERS, "forward": 2.0}, {}, {}, {}, {}, {}, {})
    stages = [SimpleNamespace(figures=each) for each in (planned(BatchSchedule(8, 2, 8, 1, 0)).figures, slow)]
    pipeline = SimpleNamespace(stages=stages, step_seconds=20.0)
    plan = planned(BatchSchedule(final=8, unit=2, start=4, increment=4, ramp_samples=12), pipeline)
    assert plan.run_seconds == pytest.approx(3 * (20 - 2 * 4) + 4 * 20)
