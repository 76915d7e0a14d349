"""Runs side by side: groups over seeds, mean and band worked by hand, what differs in the configurations."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamoe.apps.report.comparison import (
    _mean_and_deviation,
    band_curve,
    comparison_sections,
    config_differences,
    grouped,
    labels_of,
    seed_rows,
)
from megamoe.apps.report.page import write_page
from megamoe.apps.report.run_statistics import Run, comparison_row, read_run

CONFIG = """name: {name}
output: runs
seed: {seed}
moe:
  num_experts: {experts}
  losses: {{z_loss: {{weight: 0.1}}}}
data: {{split: [0.9, 0.1, 0]}}
log: {{every: {seed}}}
"""


def run_of(folder: Path, losses: list[float], seed: int = 1, experts: int = 8, **metrics: Any) -> Run:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "tokens": 10 * step, "val/lm_loss": loss, "moe/imbalance": 2.0, **metrics}
        for step, loss in enumerate(losses, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "config.yaml").write_text(CONFIG.format(name=folder.name, seed=seed, experts=experts))
    return read_run(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two seeds of one run, and another with more experts."""
    return [
        run_of(tmp_path / "small-1", [4.0, 3.0, 2.0], seed=1),
        run_of(tmp_path / "large", [4.0, 2.0], experts=64),
        run_of(tmp_path / "small-2", [6.0, 4.0], seed=2),
    ]


def test_runs_of_other_seeds_and_names_are_one_group(runs: list[Run]) -> None:
    groups = grouped(runs)
    assert [(group.name, [run.name for run in group.runs]) for group in groups] == [
        ("small (2 seeds)", ["small-1", "small-2"]),
        ("large", ["large"]),
    ]
    first, second = seed_rows(groups)
    assert first == ["small (2 seeds)", "2", "3.0000 ± 1.4142", "3.0000 ± 1.4142", "-", "2.00 ± 0.00"]
    assert second == ["large", "1", "2.0000", "2.0000", "-", "2.00"]


@pytest.mark.parametrize(("values", "text"), [([1.0, math.nan], "nan"), ([math.inf, 1.0], "inf")])
def test_a_seed_that_diverged_has_no_deviation(values: list[float | None], text: str) -> None:
    assert _mean_and_deviation(values, "{:.2f}") == text


def test_runs_of_one_seed_are_not_called_seeds(tmp_path: Path) -> None:
    again = [run_of(tmp_path / name, [1.0], seed=1) for name in ("small-1", "small-2")]
    assert [group.name for group in grouped(again)] == ["small (2 runs)"]


def test_a_further_set_stands_for_a_main_one_that_is_not_there(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [4.0, 2.0])
    for row in run.rows:
        row["val/all/lm_loss"] = row.pop("val/lm_loss")
    loss, by_tokens = comparison_sections([run])[0].panels
    assert (loss.title, by_tokens.title) == ("Validation: all", "Validation: all by tokens")
    assert (by_tokens.curves[0].x, by_tokens.curves[0].y) == ([10, 20], [4.0, 2.0])
    assert comparison_row(run)[5:9] == ["4.0000 (all)", "2.0000 (all)", "50.00", "7.39"]


def test_runs_without_a_configuration_stay_alone(runs: list[Run]) -> None:
    for run in runs:
        (run.folder / "config.yaml").write_text("a: [")
    again = [read_run(run.folder) for run in runs]
    assert len(grouped(again)) == 3 and config_differences(again) == []


def test_the_keys_that_differ_are_listed_without_names(runs: list[Run]) -> None:
    assert config_differences(runs) == [
        ["seed", "1", "1", "2"],
        ["moe.num_experts", "8", "64", "8"],
        ["log.every", "1", "1", "2"],
    ]


def test_equal_names_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    both = [run_of(tmp_path / study / "run", [1.0]) for study in ("a", "b")]
    first, second = labels_of(both)
    assert first.endswith("/a/run") and second.endswith("/b/run")


def test_the_band_reaches_from_the_lowest_to_the_highest_at_shared_steps(runs: list[Run]) -> None:
    loss, by_tokens = comparison_sections(runs)[0].panels
    small, large = loss.curves
    assert (small.x, small.y, small.low, small.high) == ([1, 2], [5.0, 3.5], [4.0, 3.0], [6.0, 4.0])
    assert (large.x, large.y, large.low) == ([1, 2], [4.0, 2.0], None)
    assert by_tokens.curves[0].x == [10, 20] and by_tokens.x == "training data (tokens)"


def test_curves_without_a_shared_step_show_the_first() -> None:
    curve = band_curve("two", [([1, 2], np.array([1.0, 2.0])), ([3], np.array([9.0]))], "blue")
    assert (curve.x, curve.y, curve.low) == ([1, 2], [1.0, 2.0], None)


def test_every_axis_of_the_comparison_has_its_unit(tmp_path: Path) -> None:
    names = "max_vio_run load_cv dead dropped experts_per_token gate_entropy top1_prob rank_imbalance"
    routing: dict[str, Any] = {f"moe/{name}": 1.0 for name in names.split()} | {"train/lm_loss": 2.0}
    sections = comparison_sections([run_of(tmp_path / "run", [1.0], **routing)])
    assert [section.title for section in sections] == ["Loss", "Training and speed", "Routing"]
    panels = [panel for section in sections for panel in section.panels]
    assert len(panels) == 2 + 1 + 9
    for panel in panels:
        assert re.fullmatch(r".{3,} \(.+\)", panel.x) and re.fullmatch(r".{3,} \(.+\)", panel.y), panel.title


def test_the_page_of_a_comparison(runs: list[Run], tmp_path: Path) -> None:
    page = write_page(runs, tmp_path / "c.html").read_text(encoding="utf-8")
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == ["Runs", "Over seeds", "What differs in the configurations", "Loss", "Routing"]
    assert "<tr><th>moe.num_experts</th><td>8</td><td>64</td><td>8</td></tr>" in page


def test_runs_that_differ_in_nothing_and_have_no_record(tmp_path: Path) -> None:
    empty = [run_of(tmp_path / name, []) for name in ("a", "b")]
    page = write_page(empty, tmp_path / "c.html").read_text(encoding="utf-8")
    assert "Nothing but names and folders" in page
