"""Hostile input of the tools: one line that names the file, exit code 2, and nothing is left."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import checkpoint
from tests.support.refusals import Case, cases
from tests.support.tiny import tool

Refused = Callable[..., str]
ROW = {"step": 1, "train/lm_loss": 2.0, "moe/layer_01/load": [1, 2], "moe/layer_01/imbalance": 1.5}


@pytest.mark.parametrize("case", cases("tools"))
def test_a_mistake_is_one_line_and_nothing_is_written(
    tmp_path: Path, refused: Refused, case: Case, expect_message: Callable[..., None]
) -> None:
    files = case.row.get("files", {})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    expect_message(case, refused(case["tool"], *case["arguments"]))
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == files.keys()
    assert {path.name for path in tmp_path.iterdir()} == {name.partition("/")[0] for name in files}


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


@pytest.mark.parametrize("kind", ["a pipe", "/dev/zero", "a deep summary"])
def test_a_report_of_what_is_no_run(tmp_path: Path, refused: Refused, kind: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if kind == "a pipe":
        os.mkfifo(metrics)
    elif kind == "/dev/zero":
        metrics.symlink_to(kind)
    else:
        metrics.write_text(f"{json.dumps(ROW)}\n")
        (tmp_path / "summary.json").write_text("[" * 100_000)
    assert refused("report", tmp_path).startswith(f"error: {tmp_path}")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("is_old", [True, False])
def test_a_conversion_removes_what_a_killed_one_has_left(tmp_path: Path, is_old: bool) -> None:
    step = checkpoint.write(tmp_path / "step_00000007")
    left = tmp_path / ".converting_other_0123abcd"
    left.mkdir()
    if is_old:
        os.utime(left, (1, 1))
    assert tool("checkpoint").main(["convert", str(step), str(tmp_path / "out"), "--consolidated"]) == 0
    assert left.exists() is not is_old


def test_a_preparation_by_an_absurd_number_of_processes(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "in.txt").write_text("x")
    options = ["--output=out", "--tokenizer=bytes", "--workers=100000"]
    assert ": expected at most " in refused("prepare_data", "in.txt", *options)
    assert os.listdir(tmp_path) == ["in.txt"]
