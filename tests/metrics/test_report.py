"""The report and the comparison: numbers worked by hand, dense runs, nothing half written."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamoe.errors import UserError
from megamoe.metrics.report.charts import charts_for, load_shares, smooth
from megamoe.metrics.report.page import write_report
from megamoe.metrics.report.run_statistics import comparison_table, compute_statistics, read_run

TOOL = Path(__file__).parents[2] / "tools" / "report.py"


def moe_rows() -> list[dict[str, Any]]:
    """Four steps, two MoE layers of three experts; expert 1 of layer 10 never receives a pair."""
    speeds = (1000.0, 3000.0, 2000.0, 4000.0)
    return [
        {
            "step": step,
            "tokens": step * 512,
            "time": 1.7e9 + step,
            "train/lm_loss": 8.0 - step,
            "train/loss": 8.1 - step,
            "train/switch_balance": 1.5,
            "train/grad_norm": 1.0,
            "train/lr": 1e-4,
            "perf/tokens_per_s": speed,
            "perf/step_s": 15.5,
            "moe/layer_02/load": [4, 4, 4],
            "moe/layer_02/imbalance": 1.0,
            "moe/layer_02/dropped": 0.0,
            "moe/layer_10/load": [8 + step, 0, 4 - step],
            "moe/layer_10/imbalance": (8 + step) / 4,
            "moe/layer_10/dropped": 0.0,
        }
        | ({"val/lm_loss": {1: 8.0, 3: 4.5, 4: 5.0}[step], "val/code/lm_loss": 2.25} if step != 2 else {})
        for step, speed in zip((1, 2, 3, 4), speeds, strict=True)
    ]


def dense_rows() -> list[dict[str, Any]]:
    return [{"step": step, "tokens": 64 * step, "train/lm_loss": 9.0 - step} for step in (1, 2)]


def make_run(folder: Path, rows: list[dict[str, Any]], **summary: Any) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def table_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))


def test_the_page_holds_the_facts_and_needs_nothing_else(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a<b", moe_rows(), parameters_total=24_318_976, parameters_active=9_117_184)
    (folder / "config.yaml").write_text("name: a<b\nseed: 4321\n")
    page = write_report(folder).read_text(encoding="utf-8")
    assert table_of(page) == {
        "Parameters": "24,318,976",
        "Parameters active per token": "9,117,184",
        "Steps": "4",
        "Tokens": "2,048",
        "Training loss, last step": "4.0000",
        "Validation loss, first": "8.0000",
        "Validation loss, best": "4.5000",
        "Validation loss, last": "5.0000",
        "Validation loss, code": "2.2500",
        "Fall of the validation loss": "37.50 %",  # (8 - 5) / 8
        "Validation perplexity": "148.41",  # e^5
        "Tokens per second, median": "2,500",
        "Imbalance at the end, worst layer": "3.00",  # 12 / 4
        "Time in training steps": "1m02s",  # 4 x 15.5 s
        "Experts never used": "layer 10: 1",
    }
    assert "a&lt;b" in page and "a<b" not in page and "seed: 4321" in page
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Main facts", "Loss", "Auxiliary losses", "Optimisation and speed", "Imbalance", "Expert load"
    ]  # fmt: skip
    assert page.count("data:image/png;base64,iVBOR") == 2 * 5, "each chart for a light and a dark page"
    assert "http" not in page and "<script" not in page
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    written = {"metrics.jsonl", "summary.json", "config.yaml", "report.html", "report.png"}
    assert {path.name for path in folder.iterdir()} == written, "no temporary file is left"


def test_a_dense_run_has_no_section_on_experts(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "dense", dense_rows())).read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Main facts", "Loss"]
    assert "xpert" not in page and "dense" in page
    assert table_of(page) == {"Steps": "2", "Tokens": "128", "Training loss, last step": "7.0000"}


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_run_that_has_just_begun_or_diverged_still_has_a_report(tmp_path: Path, num_rows: int) -> None:
    rows = moe_rows()[:num_rows]
    rows[-1] |= {"train/lm_loss": "NaN", "val/lm_loss": "Infinity", "train/grad_norm": "NaN"}
    rows[-1] |= {"moe/layer_02/load": [0, 0, 0], "moe/layer_02/imbalance": "NaN"}
    table = table_of(write_report(make_run(tmp_path / "run", rows)).read_text(encoding="utf-8"))
    assert table["Training loss, last step"] == "nan" and table["Validation perplexity"] == "inf"


def test_load_shares_are_relative_to_an_even_share() -> None:
    rows = [
        {"step": 10, "moe/layer_01/load": [2, 2, 0, 0]},
        {"step": 20, "moe/layer_01/load": [1, 1, 1, 1]},
        {"step": 30, "moe/layer_01/load": [0, 0, 0, 0]},
    ]
    edges_B, shares_EB = load_shares(rows, "layer_01")
    assert edges_B.tolist() == [0, 10, 20, 30]
    assert shares_EB[:, :2].tolist() == [[2, 1], [2, 1], [0, 1], [0, 1]]
    assert np.isnan(shares_EB[:, 2]).all(), "no pair at all is neither idle nor fair"


def test_many_records_share_bins_by_their_summed_load() -> None:
    rows = [{"step": step, "moe/layer_01/load": [step % 2 * 3, 1 - step % 2]} for step in range(1, 1001)]
    edges_B, shares_EB = load_shares(rows, "layer_01")
    assert (len(edges_B), edges_B[0], edges_B[1], edges_B[-1]) == (101, 0, 10, 1000)
    assert shares_EB[:, 7] == pytest.approx([1.5, 0.5])  # each bin: 5 x 3 against 5 x 1


def test_the_smoothed_curve_follows_a_straight_line_and_skips_what_is_not_finite() -> None:
    assert smooth([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])[1:-1] == pytest.approx([4.0, 3.0, 2.0, 1.0])
    assert smooth([1.0, 1.0, math.nan, 1.0, math.inf, 1.0]) == pytest.approx(np.ones(6))
    assert smooth([1e30, *[1.0] * 9])[-5:] == pytest.approx(np.ones(5))


def test_a_pause_between_two_launches_is_not_training_time() -> None:
    rows = [{"step": 10, "time": 0.0, "perf/step_s": 2.0}, {"step": 30, "time": 9e6, "perf/step_s": 3.0}]
    assert compute_statistics(rows).time_s == 10 * 2.0 + 20 * 3.0


def test_charts_are_only_for_what_was_recorded() -> None:
    assert [chart.title for chart in charts_for([{"step": 1, "perf/tokens_per_s": 3.0}])] == [
        "Optimisation and speed"
    ]


def test_the_comparison_is_aligned_and_right(tmp_path: Path) -> None:
    moe = make_run(tmp_path / "moe", moe_rows(), parameters_total=24_318_976, parameters_active=9_117_184)
    dense = make_run(tmp_path / "dense-baseline", dense_rows())
    header, first, second = comparison_table([read_run(moe), read_run(dense)]).splitlines()
    assert header.split("  ")[0] == "run" and len(header) == len(first) == len(second)
    assert " ".join(first.split()) == "moe 24.3M 9.12M 4 2,048 8.0000 5.0000 37.50 148.41 2,500 3.00"
    assert " ".join(second.split()) == "dense-baseline - - 2 128 - - - - - -"


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_the_tool_writes_reports_and_compares(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, dense_rows()) for name in ("one", "two")]
    done = run_tool(*folders)
    assert done.returncode == 0, done.stderr
    assert all((folder / "report.html").exists() for folder in folders)
    assert "perplexity" in done.stdout
    assert "perplexity" not in run_tool(folders[0]).stdout


def test_the_tool_refuses_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", dense_rows())
    empty = make_run(tmp_path / "empty", [])
    for bad, output in (
        (tmp_path / "nowhere", "no such run folder"),
        (empty, "no metrics"),
        (tmp_path, "cannot read"),
    ):
        done = run_tool(good, bad)
        assert done.returncode == 2 and done.stdout == ""
        assert (
            done.stderr.startswith(f"error: {bad}") and output in done.stderr and done.stderr.count("\n") == 1
        )
    assert not (good / "report.html").exists()


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", dense_rows())
    page = write_report(folder)
    before = page.read_bytes()

    def disk_full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="no space"):
        write_report(folder)
    assert page.read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html", "report.png"]


def test_a_broken_summary_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", dense_rows())
    (folder / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json: no valid JSON"):
        read_run(folder)
