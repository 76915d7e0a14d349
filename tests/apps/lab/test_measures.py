"""Facts of a run: FLOPs of a token and of the training."""

from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.lab.measures import FACTS
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
