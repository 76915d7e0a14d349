"""The report and the comparison: numbers worked by hand, dense runs, nothing half written."""

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from megamoe.apps.report import command as tool
from megamoe.apps.report.figures import COLOURS, colour_of, figure_of, twins
from megamoe.apps.report.page import write_report
from megamoe.apps.report.panels import MOST_POINTS, MOST_RAW, envelope, smooth, spike_limits, thin
from megamoe.apps.report.run_statistics import comparison_table, compute_statistics, read_run
from megamoe.apps.report.sections import load_shares, run_sections
from megamoe.metrics import names


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
            "moe/layer_10/dropped": 0.125,
        }
        | ({"val/lm_loss": {1: 8.0, 3: 4.5, 4: 5.0}[step], "val/code/lm_loss": 2.25} if step != 2 else {})
        for step, speed in zip((1, 2, 3, 4), speeds, strict=True)
    ]


def dense_rows() -> list[dict[str, Any]]:
    return [{"step": step, "tokens": 64 * step, "train/lm_loss": 9.0 - step} for step in (1, 2)]


def content_of(page: str) -> dict[str, Any]:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def full_rows() -> list[dict[str, Any]]:
    """Four steps with every kind of metric of docs/run/metrics.md."""
    own: dict[str, Any] = {it.key: 0.5 for it in (*names.TRAINING, *names.SPEED) if "<" not in it.key}
    del own[names.VAL_LM_LOSS]
    own |= {"train/switch_balance/weighted": 0.01, "train/lm_loss/mtp_1": 7.0, "test/lm_loss": 4.75}
    for keys in (names.of_layer(2), names.of_layer(10)):
        own |= {keys[it.key]: 0.5 for it in names.LAYERS if it.unit not in ("pairs", "tokens")}
        own |= {keys["loss/switch_balance"]: 1.5}
        own |= {keys["width_histogram"]: [0, 3, 1], keys["rank_load"]: [7, 5]}
        own |= {keys["scorer/temperature"]: 0.07, keys["losses.own/norm"]: 2.0}
    return [own | row for row in moe_rows()]


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
        "Pairs dropped at the end, worst layer": "12.5%",
        "Time in training steps": "1m02s",  # 4 x 15.5 s
        "Experts never used": "layer 10: 1",
    }
    assert "a&lt;b" in page and "a<b" not in page and "seed: 4321" in page
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Main facts", "Loss", "Auxiliary losses", "Optimisation", "Speed", "Balance", "Expert load"
    ]  # fmt: skip
    assert page.count("<noscript><section>") == page.count('type="application/gzip"') == 1
    assert "connect-src 'none'" in page and not re.search(r'<script[^>]+src=|<link|src="http', page)
    packed = re.search(r'id="plotly">(.*?)</script>', page)
    assert packed and gzip.decompress(base64.b64decode(packed[1])).decode() == get_plotlyjs()
    written = {"metrics.jsonl", "summary.json", "config.yaml", "report.html"}
    assert {path.name for path in folder.iterdir()} == written, "no temporary file is left"


def test_a_dense_run_has_no_section_on_experts(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "dense", dense_rows())).read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Main facts", "Loss"]
    assert "dense" in page and len(content_of(page)["figures"]) == 1
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


def test_panels_are_only_for_what_was_recorded() -> None:
    assert [section.title for section in run_sections([{"step": 1, "perf/tokens_per_s": 3.0}])] == ["Speed"]
    assert run_sections([]) == []


def test_every_metric_of_the_docs_has_a_panel_and_every_axis_its_unit() -> None:
    rows = full_rows()
    sections = run_sections(rows)
    drawn = {f"{section.title}: {panel.title}" for section in sections for panel in section.panels}
    assert {
        "Loss: Loss", "Auxiliary losses: lm_loss/mtp_1", "Auxiliary losses: switch_balance",
        "Auxiliary losses: Weighted",
        "Optimisation: Loss scale of fp16", "Optimisation: Skipped steps since the start",
        "Speed: Model FLOP utilisation", "Speed: Stages of the MoE layers (smoothed)", "Balance: Imbalance",
        "Balance: MaxVio of the whole run", "Balance: Coefficient of variation", "Balance: Dead experts",
        "Balance: Dropped pairs", "Experts per token: Mean number of experts", "Experts per token: layer 10",
        "Gate: Entropy of the gate", "Gate: Highest probability",
        "Expert-parallel ranks: Imbalance of the all-to-all", "Expert-parallel ranks: Overload of the ranks",
        "Numbers of layers and parts: loss/switch_balance", "Numbers of layers and parts: scorer/temperature",
        "Expert load: layer 02",
    } <= drawn  # fmt: skip
    units = {panel.title: panel.y for section in sections for panel in section.panels}
    assert units["lm_loss/mtp_1"].endswith("(nats)") and units["switch_balance"].endswith("(1)")
    assert units["losses.own/norm"] == "value (the part's unit)"
    named = re.compile(r".{3,} \(.+\)")  # a name and its unit; (1) has none
    for panel in (panel for section in sections for panel in section.panels):
        assert named.fullmatch(panel.x) and named.fullmatch(panel.y), panel.title
        assert panel.heat_map is None or named.fullmatch(panel.heat_map.value)
        assert bool(panel.curves) != (panel.heat_map is not None)


def test_training_does_not_import_plotly() -> None:
    code = "import sys, megamoe.metrics, megamoe.apps.report.page; assert 'plotly' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_page_shows_the_recorded_numbers(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", full_rows())).read_text(encoding="utf-8")
    figures = content_of(page)["figures"]
    raw, smoothed, validation, code, test = figures[0]["data"]
    assert raw["x"] == [1, 2, 3, 4] and raw["y"] == [7, 6, 5, 4] and raw["opacity"] == 0.45
    assert smoothed["name"] == "training (smoothed)" and code["y"] == [2.25] * 3
    assert validation["x"] == [1, 3, 4] and validation["y"] == [8, 4.5, 5] and test["name"] == "test"
    maps = [it for it in figures if it["data"][0]["type"] == "heatmap"]
    named = [(it["layout"]["yaxis"]["title"]["text"], it["data"][0]) for it in maps]
    widths = next(it for axis, it in named if axis == "experts per token (experts)")
    assert widths["z"] == [[0] * 4, [0.75] * 4, [0.25] * 4] and widths["x"] == [0, 1, 2, 3, 4]
    load = [it for axis, it in named if axis == "expert (index)"][1]
    assert load["z"] == [[2.25, 2.5, 2.75, 3], [0, 0, 0, 0], [0.75, 0.5, 0.25, 0]]  # 3 x 9 / 12, ...


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    rows = [row | {"train/</script><b>": 1.0, "val/<i>/lm_loss": 2.0} for row in dense_rows()]
    page = write_report(make_run(tmp_path / "run", rows)).read_text(encoding="utf-8")
    assert "</script><b>" not in page and "<i>" not in page
    names = [trace.get("name") for figure in content_of(page)["figures"] for trace in figure["data"]]
    assert "validation: &lt;i&gt;" in names, "plotly.js would read a tag"


def test_long_curves_keep_their_ends_and_raw_ones_their_spikes() -> None:
    steps = list(range(1, 10_001))
    values = [2.0] * 10_000
    values[4321], values[77] = 9.0, -1.0
    x, y = envelope(steps, values)
    assert (
        len(x) <= MOST_RAW and (4322, 9.0) in zip(x, y, strict=True) and (78, -1.0) in zip(x, y, strict=True)
    )
    x, y = thin(steps, [float(step) for step in steps])
    assert len(x) == MOST_POINTS and x == y and (x[0], x[-1]) == (1, 10_000)


def test_limits_leave_out_spikes_and_hold_constants() -> None:
    low, high = spike_limits([2.0, *[1.0] * 500, 1e6]) or (0, 0)
    assert 0.9 < low < 1 and 2 < high < 2.1
    assert spike_limits([3.0, 3.0]) == (0, 6) and spike_limits([0.0]) == (0, 1)
    assert spike_limits([-3.0]) == (-6, 0) and spike_limits([math.nan]) is None


def test_colours_of_layers_go_from_the_first_to_the_last() -> None:
    found = [colour_of(depth) for depth in (0.0, 0.25, 0.5, 1.0)]
    assert found == ["#2f9d84", "#18809c", "#0064b4", "#3d0a52"]
    assert colour_of("blue") == "#0064b4" and colour_of("blue", dark=True) == "#5086d0"


def test_every_colour_of_a_figure_has_one_on_a_dark_page() -> None:
    panels = [panel for section in run_sections(full_rows()) for panel in section.panels]
    dark = twins(panels)
    for panel in panels:
        figure = figure_of(panel)
        figure.layout.template = None
        assert set(re.findall("#[0-9a-f]{6}", figure.to_json())) <= set(dark), panel.title
    assert set(COLOURS.values()) <= set(dark.items())


@pytest.mark.parametrize("rows", [0, 2])
def test_a_run_that_is_not_finished_says_so(tmp_path: Path, rows: int) -> None:
    folder = make_run(tmp_path / "run", dense_rows()[:rows], steps=30)
    (folder / "config.yaml").write_text("name: run\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lm_')  # torn
    page = write_report(folder).read_text(encoding="utf-8")
    expected = (
        "not finished: still running, stopped or interrupted, 2 of 30 steps" if rows else "No step is rec"
    )
    assert expected in page and "name: run" in page
    (folder / "summary.json").write_text('{"steps": 2}')
    assert not rows or "finished, 2 of 2 steps" in write_report(folder).read_text(encoding="utf-8")


def test_the_comparison_is_aligned_and_right(tmp_path: Path) -> None:
    moe = make_run(tmp_path / "moe", moe_rows(), parameters_total=24_318_976, parameters_active=9_117_184)
    dense = make_run(tmp_path / "dense-baseline", dense_rows())
    header, first, second = comparison_table([read_run(moe), read_run(dense)]).splitlines()
    assert header.split("  ")[0] == "run" and len(header) == len(first) == len(second)
    assert " ".join(first.split()) == "moe 24.3M 9.12M 4 2,048 8.0000 5.0000 37.50 148.41 2,500 3.00 12.5"
    assert " ".join(second.split()) == "dense-baseline - - 2 128 - - - - - - -"


def test_the_tool_writes_reports_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [make_run(tmp_path / name, dense_rows()) for name in ("one", "two")]
    assert tool.main([*map(str, folders)]) == 0 and "perplexity" in capsys.readouterr().out
    assert (tmp_path / "comparison.html").exists()
    assert all((folder / "report.html").exists() for folder in folders)


def test_a_folder_named_twice_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", dense_rows())
    assert tool.main([str(folder), f"{folder}/../run"]) == 0
    assert capsys.readouterr().out.count("\n") == 1 and not (tmp_path / "comparison.html").exists()


def test_a_further_set_stands_for_a_main_one_that_is_not_there(tmp_path: Path) -> None:
    rows = [{**row, "val/lm_loss": None} for row in moe_rows()]
    page = write_report(make_run(tmp_path / "run", rows)).read_text(encoding="utf-8")
    shown = table_of(page)
    assert shown["Validation loss (code), last"] == "2.2500" and "Validation loss, code" not in shown
    assert shown["Validation perplexity (code)"] == "9.49"  # e^2.25
    assert "<dt>Validation loss (code)</dt><dd>2.250</dd>" in page
    assert "<dt>Perplexity (code)</dt><dd>9.5</dd>" in page


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", dense_rows())
    page = write_report(folder)
    before = page.read_bytes()

    def disk_full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", disk_full)
    with pytest.raises(OSError, match="no space") as caught:
        write_report(folder)
    assert caught.value.filename == str(page), "not the temporary file"
    assert page.read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html"]
