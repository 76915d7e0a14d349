"""Facts of a run: FLOPs of a token and of the training."""

from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.lab.measures import FACTS
from megamoe.apps.report.run_statistics import compute_statistics

NEW = [{"step": step, "tokens": 100 * step, "perf/gflops_per_token": 2e-6 * step} for step in (1, 2, 3)]
# Of an earlier version: two ranks, batches of 2 and 4 samples of 8 tokens.
OLD = [
    {"step": 1, "tokens": 16, "perf/tflops_per_rank": 1e-6, "perf/step_s": 0.5, "train/batch_size": 2},
    {"step": 2, "tokens": 48, "perf/tflops_per_rank": 2e-6, "perf/step_s": 0.5, "train/batch_size": 4},
    {"step": 2, "tokens": 48, "val/lm_loss": 1.0},
]


def fact(name: str, rows: list[dict[str, Any]], **config: Any) -> Any:
    statistics = compute_statistics(rows)
    run = SimpleNamespace(rows=rows, summary={"ranks": 2}, config=config, statistics=statistics)
    return FACTS[name](run, None, None)


def test_flops_are_those_that_the_run_has_recorded() -> None:
    """By hand, without a batch in the configuration, as where it follows from the ranks. The tokens of a
    sample are those that its objective counts, not the length of the sequence.
    """
    config = {"data.sequence_length": 8, "train.global_batch_size": None}
    assert fact("flops_per_token", NEW, **config) == pytest.approx(4e3)
    assert fact("training_flops", NEW, **config) == pytest.approx(4e3 * 300)


def test_flops_of_records_of_earlier_versions() -> None:
    """By the batch of the step: 1e6 FLOPs of 16 tokens, then 2e6 of 32."""
    config = {"data.sequence_length": 8, "train.global_batch_size": 4}
    assert fact("flops_per_token", OLD, **config) == pytest.approx(62500)
    assert fact("training_flops", OLD, **config) == pytest.approx(62500 * 48)
    assert fact("flops_per_token", OLD) is None and fact("training_flops", OLD[2:], **config) is None
