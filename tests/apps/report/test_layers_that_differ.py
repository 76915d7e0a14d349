"""Layers that differ in the report and in W&B: the example's run, whose layers have 16, 12 and 64 experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamoe.apps.report.page import write_report
from megamoe.apps.report.record import read_metrics
from megamoe.apps.report.run_statistics import read_run
from megamoe.apps.report.sections import run_sections
from megamoe.config import load_config
from megamoe.metrics.sinks.summaries import summary_of
from megamoe.train.loop import train
from tests.support.tiny import ROOT, restored_process

STEPS, TOKENS = 3, 8 * 16
SHORT = [
    f"train.steps={STEPS}",
    "data.sequence_length=16",
    "data.workers=0",
    "log.every=1",
    "optimizer.warmup_steps=1",
]
COMPUTING = [16, 16, 8, 8, 64, 64]  # experts of each layer that compute; identity experts have no load


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    with restored_process():
        more = [f"output={output}", "log.report=false", *SHORT]
        train(load_config(ROOT / "examples/layers_that_differ.yaml", more))
    return output / "layers_that_differ"


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


def test_each_layer_has_a_map_of_its_own_experts(run: Path, rows: list[dict[str, Any]]) -> None:
    sections = {section.title: section.panels for section in run_sections(rows)}
    maps = [panel.heat_map for panel in sections["Expert load"]]
    assert [len(each.values_EB) for each in maps if each is not None] == COMPUTING
    for each in maps:
        assert each is not None and np.nanmean(each.values_EB, axis=0) == pytest.approx(1.0)
    widths = [panel.heat_map for panel in sections["Experts per token"] if panel.heat_map is not None]
    assert len(widths) == len(COMPUTING)
    assert widths[0].values_EB[1] == pytest.approx(1.0), "the table gives each token one expert"
    assert 0 < widths[2].values_EB[0].max() < 1, (
        "some tokens of the middle layers have identity experts alone"
    )
    page = write_report(run).read_text(encoding="utf-8")
    assert all(f"layer {number:02d}" in page for number in range(1, 7))
    assert read_run(run).rows == rows


def test_wandb_gets_the_load_of_all_experts(rows: list[dict[str, Any]]) -> None:
    step = summary_of(rows[-1])
    counts, _ = step.histograms["load/histogram"]
    assert sum(counts) == sum(COMPUTING)
    widths, _ = step.histograms["experts_per_token"]
    assert sum(widths) == len(COMPUTING) * TOKENS


def test_a_layer_without_a_loss_has_no_value_of_it(rows: list[dict[str, Any]]) -> None:
    """`train/<loss>` is the mean over the layers that have it, the weighted one their sum."""
    row = rows[-1]
    of_layers = {number: row.get(f"moe/layer_{number:02d}/loss/switch_balance") for number in range(1, 7)}
    assert [number for number, value in of_layers.items() if value is not None] == [3, 4, 5, 6]
    values = [value for value in of_layers.values() if value is not None]
    assert row["train/switch_balance"] == pytest.approx(np.mean(values), rel=1e-5)
    assert row["train/switch_balance/weighted"] == pytest.approx(0.01 * sum(values), rel=1e-5)
