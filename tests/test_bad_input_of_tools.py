"""Hostile input of the tools: one line that names the file, exit code 2, and nothing is left."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support import checkpoint
from tests.support.tiny import tool

Refused = Callable[..., str]
ROW = {"step": 1, "train/lm_loss": 2.0, "moe/layer_01/load": [1, 2], "moe/layer_01/imbalance": 1.5}
BAD_ROWS = {
    "text as a loss": ({"train/lm_loss": "abc"}, 'line 2: train/lm_loss is "abc", expected a number'),
    "a list as a loss": ({"val/lm_loss": [1]}, "line 2: val/lm_loss is [1], expected a number"),
    "a map as a loss": ({"val/lm_loss": {"a": 1}}, 'line 2: val/lm_loss is {"a": 1}, expected a number'),
    "true as a speed": ({"perf/tokens_per_s": True}, "perf/tokens_per_s is true, expected a number"),
    "a load of another length": (
        {"moe/layer_01/load": [1, 2, 3]},
        "line 2: moe/layer_01/load is [1, 2, 3], expected 2 numbers, one for each expert, as in",
    ),
    "a load of text": ({"moe/layer_01/load": ["a", "b"]}, "expected a list of numbers of at least 0"),
    "an empty load": ({"moe/layer_01/load": []}, "expected a list of numbers of at least 0"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_report_of_odd_figures(tmp_path: Path, refused: Refused, case: str) -> None:
    changes, expected = BAD_ROWS[case]
    rows: list[dict[str, Any]] = [ROW, {**ROW, "step": 2, **cast(dict[str, Any], changes)}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert expected in refused("report", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_report_of_numbers_at_the_end_of_floats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report also has unusual names, and nested values that it does not read."""
    folder = tmp_path / "a$b_{"
    folder.mkdir()
    keys = ("train/lm_loss", "val/lm_loss", "train/$x_{", "perf/step_s", "perf/tokens_per_s", "tokens")
    rows = [
        {**ROW, "step": step, **dict.fromkeys(keys, value), "deep": [[[[1]]]], "train/\ud800": 1.0}
        for step, value in enumerate((1e308, -1e308, "Infinity", 10**400, 2.0), start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert tool("report").main([str(folder)]) == 0, capsys.readouterr().err
    assert (folder / "report.html").stat().st_size < 1 << 22


NO_RUN = ("no run", "a pipe", "/dev/zero", "a name too long", "a text summary", "a deep summary", "no step")


@pytest.mark.parametrize("kind", NO_RUN)
def test_a_report_of_what_is_no_run(tmp_path: Path, refused: Refused, kind: str) -> None:
    folder, metrics = tmp_path, tmp_path / "metrics.jsonl"
    if kind == "no run":
        folder = tmp_path / "nowhere"
    elif kind == "a pipe":
        os.mkfifo(metrics)
    elif kind == "/dev/zero":
        metrics.symlink_to(kind)
    elif kind == "no step":
        metrics.touch()
    elif kind == "a name too long":
        folder = tmp_path / ("a" * 300)
    else:
        metrics.write_text(f"{json.dumps(ROW)}\n")
        text = "[" * 100_000 if kind == "a deep summary" else '{"parameters_total": "many"}'
        (tmp_path / "summary.json").write_text(text)
    assert refused("report", folder).startswith(f"error: {folder}")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["one", "two", "--output=nowhere/x.html"], "--output: nowhere/x.html cannot be written: No such"),
        (["one", "two", "--output=x.png"], "--output: found x.png, expected a name that ends in .html"),
        (["one", "--output=x.html"], "--output: x.html is for the page that compares runs, but one run is"),
        (["one", "two/../one", "--output=x.html"], "--output: x.html is for the page that compares runs"),
    ],
)
def test_options_of_a_report_without_effect_are_refused_and_nothing_is_written(
    tmp_path: Path, refused: Refused, arguments: list[str], told: str
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(f"{json.dumps(ROW)}\n")
    assert refused("report", *arguments).startswith(f"error: {told}")
    assert [path.name for folder in folders for path in folder.iterdir()] == ["metrics.jsonl"] * 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("is_old", [True, False])
def test_a_conversion_removes_what_a_killed_one_has_left(tmp_path: Path, is_old: bool) -> None:
    step = checkpoint.write(tmp_path / "step_00000007")
    left = tmp_path / ".converting_other_0123abcd"
    left.mkdir()
    if is_old:
        os.utime(left, (1, 1))
    assert tool("checkpoint").main(["convert", str(step), str(tmp_path / "out"), "--consolidated"]) == 0
    assert left.exists() is not is_old


@pytest.mark.parametrize("option", ["--workers=100000", "--vocab-size=1000000000000"])
def test_a_preparation_of_absurd_numbers(tmp_path: Path, refused: Refused, option: str) -> None:
    (tmp_path / "in.txt").write_text("x")
    line = refused("prepare_data", "in.txt", "--tokenizer=train", "--output=out", option)
    assert ": expected at most " in line
    assert os.listdir(tmp_path) == ["in.txt"]
