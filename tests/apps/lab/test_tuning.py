"""Tuning: a value is chosen once, a row that cannot be tuned is a row, and jobs of an array only read it.

The runs are short programs that write a loss, or fail, as a file says.
"""

import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megamoe.apps.lab import page as lab_page
from megamoe.apps.lab import runner as lab_runner
from megamoe.apps.lab import tasks as lab_tasks
from megamoe.apps.lab.plan import load_plan
from megamoe.apps.lab.runner import STAGE_STEPS, Pace, Runner, TaskRecord, locked
from megamoe.apps.lab.tasks import Task, planned_tasks, study_tasks, tuning_tasks
from megamoe.apps.lab.tuning import TUNED, tune, tuning_to_run, values_of
from megamoe.cli import call
from tests.apps.lab.test_lab import written

TRAINS = """
import json, pathlib, sys
file, name, folder = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
losses = json.loads(file.read_text())
folder.mkdir(parents=True, exist_ok=True)
with (folder / "calls").open("a") as file:
    file.write("x")
loss = losses.get(name, 3.0)
if loss is None:
    sys.exit("error: no memory")
(folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "tokens": 128, "val/lm_loss": loss}) + chr(10))
(folder / "summary.json").write_text(json.dumps({"parameters_total": 1000 if name[0] == "o" else 2000}))
"""
TUNING: dict[str, Any] = {"key": "optimizer.lr", "values": [0.1, 0.2], "set": {"train": {"steps": 2}}}
ROWS: dict[str, Any] = {
    "one": {"base": "run.yaml", "set": {"moe": {"router": {"selector": {"k": 1, "weights": "raw"}}}}},
    "two": {"base": "run.yaml"},
}
HTML = lab_page._html
CLAIM = {"text": "One is better", "test": "loss(one) < loss(two)"}
Lab = Callable[..., int]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A call of the lab in tmp_path/lab. losses: by name of a run, None: it fails; the others end with 3."""
    training = lab_tasks._training

    def fake(*arguments: Any) -> Task:
        task = training(*arguments)
        script = ("-c", TRAINS, str(tmp_path / "losses.json"), task.name, str(task.folder))
        return dataclasses.replace(task, arguments=script)

    monkeypatch.setattr(lab_tasks, "_training", fake)
    monkeypatch.setattr(lab_runner, "POLL_S", 0.01)
    monkeypatch.setattr(lab_page, "draw", lambda *_: [])  # seconds each
    monkeypatch.setattr(lab_page, "_html", lambda *_: "")
    study(tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/.lab").touch()

    def lab(losses: dict[str, float | None], *more: str) -> int:
        (tmp_path / "losses.json").write_text(json.dumps(losses))
        return call("lab", [str(tmp_path / "study.yaml"), "--output", str(tmp_path / "lab"), *more])

    return lab


def study(folder: Path, tuning: dict[str, Any] | None = TUNING, **changes: Any) -> None:
    sizes = {"smoke": {"seeds": [1], "time": "seconds", "tuning": tuning}}
    measures = {"loss": {"metric": "val/lm_loss"}}
    given = {"rows": ROWS, "stages": {}, "claims": [CLAIM], "measures": measures, "sizes": sizes}
    written(folder, **(given | changes))


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "lab/page/results.json").read_text())
    return found


def calls(folder: Path, name: str) -> int:
    path = folder / "lab/runs" / name / "calls"
    return len(path.read_text()) if path.exists() else 0


def test_a_row_whose_tuning_fails_is_a_row(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lab({"tuning-two-0": None, "tuning-two-1": None}) == 1
    shown = capfd.readouterr().out
    assert "two: optimizer.lr not tuned, so not trained" in shown and "one: optimizer.lr 0.1 (" in shown
    assert "failed: tuning-two-0: error: no memory (exit code 1)" in shown
    found = results(tmp_path)["rows"]
    assert found["one"]["measures"]["loss"]["mean"] == 3.0 and found["one"]["failed"] == []
    assert [line.partition(":")[0] for line in found["two"]["failed"]] == ["tuning-two-0", "tuning-two-1"]
    assert results(tmp_path)["claims"][0]["verdict"] == "not measured" and not calls(tmp_path, "two-1")
    page = (tmp_path / "lab/page/index.md").read_text()
    assert "| two | failed |" in page and "- tuning-two-1: error: no memory" in page
    assert lab({}) == 0  # no run rests on a value, so the next call tries again
    assert calls(tmp_path, "two-1") == 1 and calls(tmp_path, "tuning-two-0") == 2
    assert calls(tmp_path, "one-1") == calls(tmp_path, "tuning-one-0") == 1


def test_a_metric_that_no_run_has(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The nearest one is named, in the output and on the page; of some rows alone it is no problem."""
    measures = {"loss": {"metric": "val/lm_loss"}, "typo": {"metric": "val/ml_loss"}}
    study(tmp_path, None, measures=measures, curves={"time": {"metric": "perf/step_s"}})
    assert lab({"two-1": None}) == 1
    line = "measure typo: no run has the metric 'val/ml_loss'; did you mean 'val/lm_loss'?"
    assert line in capfd.readouterr().out.splitlines()
    assert lab({}) == 1 and line in capfd.readouterr().out
    assert results(tmp_path)["unrecorded"] == [line, "curve time: no run has the metric 'perf/step_s'"]
    assert f"- {line}" in (tmp_path / "lab/page/index.md").read_text()
    assert lab({}, "--rows", "one") == 0 and line in capfd.readouterr().out


def test_an_idea_of_ones_own_has_no_source(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path, None)
    tree = yaml.safe_load((tmp_path / "study.yaml").read_text())
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({key: tree[key] for key in tree if key != "source"}))
    assert lab({}) == 0
    assert capfd.readouterr().out.startswith("One expert or two\nsize smoke")
    assert "\n\nSize `smoke`, seeds 1.\n" in (tmp_path / "lab/page/index.md").read_text()


def test_a_value_is_chosen_once(lab: Lab, tmp_path: Path) -> None:
    """A tuning run that failed would succeed later, with a lower loss than the chosen one."""
    assert lab({"tuning-one-0": None, "tuning-one-1": 2.0}) == 0
    kept = json.loads((tmp_path / "lab/tasks" / TUNED).read_text())
    assert kept["one"]["losses"] == [None, 2.0] and kept["one"]["index"] == 1 and kept["two"]["index"] == 0
    assert "Without the runs that failed: tuning-one-0: error" in (tmp_path / "lab/page/index.md").read_text()
    for _ in range(2):  # the second time in a folder without the file, as those of before have none
        assert lab({"tuning-one-0": 1.0}, "--seeds", "2") == 0
        assert results(tmp_path)["rows"]["one"]["tuned"] == 0.2
        assert calls(tmp_path, "tuning-one-0") == calls(tmp_path, "one-1") == calls(tmp_path, "one-2") == 1
        assert json.loads((tmp_path / "lab/tasks" / TUNED).read_text()) == kept
        (tmp_path / "lab/tasks" / TUNED).unlink()


def test_another_rule_chooses_anew(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab({"tuning-one-1": 2.0}) == 0
    study(tmp_path, TUNING | {"values": [0.1, 0.2, 0.3]})
    plan = load_plan(tmp_path / "study.yaml", "smoke", None, [])
    runner = Runner(tmp_path / "lab", [None], print)
    (tmp_path / "losses.json").write_text(json.dumps({"tuning-one-2": 1.0}))
    chosen, without = values_of(tune(plan, tmp_path / "lab", runner))
    assert chosen == {"one": 0.3, "two": 0.1} and without == []
    assert calls(tmp_path, "tuning-one-0") == calls(tmp_path, "tuning-one-2") == 1
    assert tuning_to_run(plan, tmp_path / "lab", runner) == []
    for broken in ("{", '{"one": {}}', '{"one": 1}', "[]"):
        (tmp_path / "lab/tasks" / TUNED).write_text(broken)
        capsys.readouterr()
        assert lab({}) == 2
        told = capsys.readouterr().err
        assert f"{TUNED}: " in told and "delete it, and the values are chosen again" in told


def test_rows_may_be_tuned_together(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: means 2.5 of 0.1, where one would take 0.2, and 2.6 of 0.2."""
    rows = ROWS | {"three": {"base": "run.yaml", "set": {"optimizer": {"min_lr": 0.01}}}}
    study(tmp_path, rows=rows, tuned_rows=["one", "two"])
    losses: dict[str, float | None] = {"tuning-one-0": 3.0, "tuning-two-0": 2.0}
    losses |= {"tuning-one-1": 2.1, "tuning-two-1": 3.1}
    assert lab(losses, "--rows", "three") == 0
    assert "all rows, by one and two: optimizer.lr 0.1 (val/lm_loss of 0.1: 2.5000, 0.2: 2.6000)" in (
        capsys.readouterr().out
    )
    assert calls(tmp_path, "tuning-two-1") == calls(tmp_path, "three-1") == 1
    assert not calls(tmp_path, "tuning-three-0") and not calls(tmp_path, "one-1")
    (tmp_path / "lab/runs/tuning-two-1/metrics.jsonl").write_text("")  # the choice stays
    assert lab({}) == 0
    assert {row["tuned"] for row in results(tmp_path)["rows"].values()} == {0.1}
    page = (tmp_path / "lab/page/index.md").read_text()
    assert (
        "that of 0.1, 0.2 whose runs of one and two, seed 0, ended with the lowest mean `val/lm_loss`" in page
    )
    assert "because the first or last was taken." in page
    kept = json.loads((tmp_path / "lab/tasks" / TUNED).read_text())
    assert len({it["identity"] for it in kept.values()}) == 1 and len(kept) == 3


def test_of_rows_tuned_together_a_value_counts_if_all_its_runs_ended(lab: Lab, tmp_path: Path) -> None:
    study(tmp_path, tuned_rows=["one", "two"])
    assert lab({"tuning-one-0": 1.0, "tuning-two-0": None}) == 0
    found = results(tmp_path)["rows"]
    assert [found[row]["tuned"] for row in ("one", "two")] == [0.2, 0.2]
    assert found["one"]["tuning_failed"] == ["tuning-two-0: error: no memory (exit code 1)"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"by": "val/valid/lm_loss"}, "val/lm_loss"),  # the set `valid` has the short name
        ({"by": "test/lm_loss"}, "val/lm_loss"),
        ({"by": "test/lm_loss", "set": {"data": {"split": [1, 0, 0]}}}, "none: the run has no such data"),
    ],
)
def test_a_metric_that_the_runs_do_not_record(
    changed: dict[str, Any], expected: str, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would show when all tuning runs have ended."""
    study(tmp_path, TUNING | changed)
    assert lab({}) == 2
    line = f"tuning.by: row one does not record {changed['by']!r}; expected {expected}\n"
    assert capsys.readouterr().err.endswith(line)


def test_an_unknown_row_of_the_tuning(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(tmp_path, tuned_rows=["one", "tow"])
    assert lab({}) == 2
    assert "tuned_rows: no row 'tow'; expected some of one, two" in capsys.readouterr().err


def test_an_interrupted_tuning_is_completed_first(lab: Lab, tmp_path: Path) -> None:
    """A folder without the file and without runs of the row: what failed is tried again."""
    plan, output = load_plan(tmp_path / "study.yaml", "smoke", None, []), tmp_path / "lab"
    runner = Runner(output, [None], print)
    (tmp_path / "losses.json").write_text(json.dumps({"tuning-one-0": None}))
    runner.run(tuning_tasks(plan, output)[0].by_name.values())
    names = ["tuning-one-0", "tuning-one-1", "tuning-two-0", "tuning-two-1"]
    assert [task.name for task in tuning_to_run(plan, output, runner)] == names
    assert lab({"tuning-one-0": 1.0}) == 0
    assert results(tmp_path)["rows"]["one"]["tuned"] == 0.1 and calls(tmp_path, "tuning-two-0") == 1


@pytest.mark.parametrize("state", ["started", "stopped"])
def test_an_interrupted_tuning_run_decides_nothing(
    state: str, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a job that reached its time limit, or by a signal. It would have had the lowest loss."""
    plan, output = load_plan(tmp_path / "study.yaml", "smoke", None, []), tmp_path / "lab"
    runner, [_, task, *_] = Runner(output, [None], print), tuning_tasks(plan, output)[0].by_name.values()
    assert task.name == "tuning-one-1"
    for chain in (0, 2, 3):
        assert lab({}, "--phase", "tuning", "--chain", str(chain)) == 0
    runner._write(task, TaskRecord(task.identity, state))
    capsys.readouterr()
    assert lab({}, "--phase", "study", "--chain", "0") == 0
    told = capsys.readouterr().out
    assert told == "one-1: not run, because its row has no tuned value: tuning-one-1: not complete; " + (
        "the last job, or another submission, completes the tuning first\n"
    )
    assert lab({}, "--phase", "study", "--chain", "1") == 0
    assert calls(tmp_path, "one-1") == 0 and calls(tmp_path, "two-1") == 1
    assert [*json.loads((output / "tasks" / TUNED).read_text())] == ["two"]
    assert lab({"tuning-one-1": 1.0}) == 0  # the last job
    assert results(tmp_path)["rows"]["one"]["tuned"] == 0.2 and calls(tmp_path, "one-1") == 1
    # A folder without the file, as those of before have none: an interrupted run goes on first.
    (output / "tasks" / TUNED).unlink()
    runner._write(task, TaskRecord(task.identity, state))
    assert lab({"tuning-one-1": 1.0}) == 0 and calls(tmp_path, "tuning-one-1") == 2


def test_a_half_trained_run_has_no_number(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in ends with step 4, as train.exit_after_steps=4 does."""
    study(tmp_path, None)
    assert lab({}, "train.steps=6") == 1
    told = capsys.readouterr().out
    assert "failed: one-1: stopped at step 4 of 6; the same command goes on with it" in told
    assert results(tmp_path)["claims"][0]["verdict"] == "not measured"


def test_jobs_of_an_array_do_not_tune(lab: Lab, tmp_path: Path) -> None:
    """One failed tuning run, and a row without any: the jobs of the study read what the others came to."""
    losses: dict[str, float | None] = {"tuning-one-0": None, "tuning-two-0": None, "tuning-two-1": None}
    for chain in range(4):
        assert lab(losses, "--phase", "tuning", "--chain", str(chain)) == 0
    for chain in range(2):
        assert lab({}, "--phase", "study", "--chain", str(chain)) == 0
    assert calls(tmp_path, "tuning-one-0") == calls(tmp_path, "tuning-two-0") == calls(tmp_path, "one-1") == 1
    assert calls(tmp_path, "two-1") == 0
    assert lab({}, "--phase", "tuning", "--chain", "0") == 0  # submitted again: the value is chosen
    assert calls(tmp_path, "tuning-one-0") == 1
    assert lab({}) == 0  # the last job runs what is missing
    assert calls(tmp_path, "tuning-one-0") == calls(tmp_path, "one-1") == 1
    assert calls(tmp_path, "tuning-two-0") == 2 and calls(tmp_path, "two-1") == 1
    assert results(tmp_path)["rows"]["one"]["tuned"] == 0.2


def test_a_task_that_another_runner_completes_meanwhile(tmp_path: Path) -> None:
    task = Task("a", tmp_path / "stages/a", ("-c", "raise SystemExit('error: run twice')"), "a")
    runner = Runner(tmp_path, [None], print)
    runner.folder.mkdir()
    lock = locked(runner.folder / "a.lock")  # as the other one holds it while the task runs
    waits = threading.Thread(target=runner.run, args=([task],))
    waits.start()
    waits.join(0.5)
    assert waits.is_alive() and not runner.was_started(task)
    runner._write(task, TaskRecord("a", "done"))
    os.close(lock)
    waits.join(20)
    assert not waits.is_alive() and runner.is_done(task)


def test_the_time_left(tmp_path: Path) -> None:
    """By hand: steps that an earlier call saved count for nothing, those of later calls do."""
    saved = tmp_path / "resumed/checkpoints"
    saved.mkdir(parents=True)
    (saved / "step_00000400").mkdir()
    (saved / "step_00000800.tmp").mkdir()
    resumed, other, third = (
        Task(name, tmp_path / name, (), name, steps=1000) for name in ("resumed", "other", "third")
    )
    stage = Task("stage", tmp_path / "stage", (), "stage")
    pace = Pace([resumed, other, third, stage], after=5000)
    assert pace.seconds_left(9, [other, third, stage], [(resumed, 400)]) is None
    # 100 steps in 10 s; left 500 of the resumed run, of the others 2000, of the stage, and of later calls.
    left = 10 / 100 * (500 + 1000 + 1000 + STAGE_STEPS + 5000)
    assert pace.seconds_left(10, [other, third, stage], [(resumed, 500)]) == pytest.approx(left)
    pace.ended(resumed, whole=True)
    assert pace.seconds_left(60, [third, stage], [(other, 0)]) == pytest.approx(
        60 / 600 * (2000 + STAGE_STEPS + 5000)
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metrics.jsonl").write_text('{"step": 200}\n')
    pace.ended(other, whole=False)  # its steps were done, and nothing of it is left
    assert pace.seconds_left(80, [third], []) == pytest.approx(80 / 800 * (1000 + 5000))
    stages = [Task(f"tuned-{row}", tmp_path / "stages/tuned" / row, (), row) for row in "abc"]
    of_stages = Pace([third, *stages], slots=2)
    of_stages.know(stages[0], 30)  # of an earlier call
    of_stages.ended(stages[1], whole=True, seconds=50)
    # 100 s of two processes, of which 50 s were the stage's: 75 s for 300 steps; two stages of 40 s.
    assert of_stages.seconds_left(100, [stages[0]], [(third, 300), (stages[2], 0)]) == pytest.approx(
        75 / 300 * 700 + 2 * 40 / 2
    )
    assert (
        of_stages.seconds_left(100, [stages[0]], []) == 20 and of_stages.seconds_left(9, [third], []) is None
    )
    of_epochs = Pace([stage, third])  # a run without a number of steps, at step 700
    assert of_epochs.seconds_left(20, [third], [(stage, 700)]) == pytest.approx(20 / STAGE_STEPS * 1000)


def test_the_time_left_begins_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(lab_runner.time, "monotonic", lambda: now)
    runner = Runner(tmp_path, [None], print)
    now = 5000.0
    runner.run([])
    assert runner.pace.begun == 5000


def test_what_a_job_of_an_array_numbers(lab: Lab, tmp_path: Path) -> None:
    """Chains have the same numbers at submission and in a job, where a row may be left out."""
    plan = load_plan(tmp_path / "study.yaml", "smoke", 2, [])
    names = [[task.name for task in chain] for chain in planned_tasks(plan, tmp_path).chains()]
    assert names == [["one-1"], ["one-2"], ["two-1"], ["two-2"]]
    left = study_tasks(plan, tmp_path, {"two": 0.2}, without=["one"])
    assert [*left.by_name] == ["two-1", "two-2"] and [*left.training] == [("two", 1), ("two", 2)]


def test_a_submission(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a stand-in of sbatch: three jobs, of which the last one publishes."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/submitted\nwc -l < {tmp_path}/submitted\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    more = ["--publish", str(tmp_path / "published"), "--workers", "3", "--seeds", "2"]
    assert lab({}, "--slurm=--partition=gpu", *more) == 0
    assert "the page is written by job 3" in capsys.readouterr().out
    first, second, last = (tmp_path / "submitted").read_text().splitlines()
    assert "--array=0-3" in first and "--dependency" not in first
    assert "--array=0-3 --dependency=afterany:1" in second and "--dependency=afterany:2" in last
    scripts = {path.stem: path.read_text() for path in (tmp_path / "lab/slurm").glob("*.sbatch")}
    assert f"--publish {tmp_path / 'published'} --workers 3" in scripts["page"]
    for name in ("tuning", "study"):
        assert "--publish" not in scripts[name] and "--workers" not in scripts[name]
        assert "--seeds 2" in scripts[name] and f"--phase {name} --chain" in scripts[name]


def test_the_page(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control's table, remarks, sizes of the runs, seeds of a claim; when there are brackets."""
    monkeypatch.setattr(lab_page, "_html", HTML)
    measures = {
        "loss": {"metric": "val/lm_loss", "digits": 1},
        "perplexity": {"metric": "val/lm_loss", "exponential": True},
    }
    claims = [CLAIM, {"text": "And in perplexity", "test": "perplexity(one) < perplexity(two)"}]
    changes: dict[str, Any] = {
        "measures": measures,
        "claims": claims,
        "remarks": ["First remark.", "Second remark."],
    }
    rows = ROWS | {"three": {"base": "run.yaml", "set": {"optimizer": {"min_lr": 0.01}}}}
    study(tmp_path, rows=rows, control="two", compare=["loss", "perplexity"], **changes)
    losses: dict[str, float | None] = {
        "one-1": 1.0,
        "one-2": 1.1,
        "one-3": None,
        "two-1": 2.0,
        "two-2": 2.1,
        "two-3": 2.2,
    }
    losses |= {"three-1": 2.5, "three-2": 2.6, "three-3": 2.7}
    assert lab(losses, "--seeds", "3") == 1
    page = (tmp_path / "lab/page/index.md").read_text()
    assert "in brackets the paper's" not in page and "over the seeds.\n" in page
    assert page.index("## Claims") < page.index("\n\nFirst remark.\n\nSecond remark.\n\n## Numbers")
    assert (
        "| `loss(one) < loss(two)` | 1.0000 | 1.0000 to 1.0000 |  | 2 of 3 | within noise |" in page
    )  # all seeds on its side, but one is missing
    assert " | 1.0000 (1.0000 to 1.0000) | 2 of 3 | within noise |" in page  # of the logarithms
    assert "## Differences from two\n\n| row | loss | perplexity |" in page
    assert "| one | -1.00 (-1.00 to -1.00), 2 of 3 seeds | " in page
    assert "| three | 0.50 (0.50 to 0.50) | " in page and "| two | 0" not in page
    assert "Parameters of a model: 1k to 2k; tokens of its training: 128." in page
    found = results(tmp_path)
    assert found["control"]["row"] == "two" and found["rows"]["one"]["parameters"] == 1000
    assert found["claims"][1]["comparisons"][0]["logarithms"] == pytest.approx([1.0] * 3)
    html = (tmp_path / "lab/page/report.html").read_text()
    assert "Differences from two" in html and "<p>Second remark.</p>" in html
    monkeypatch.setattr(lab_page, "_html", lambda *_: "")
    assert lab(losses | {"one-3": 1.2}, "--seeds", "3") == 0
    assert "| 3 of 3 | seen |" in (tmp_path / "lab/page/index.md").read_text()
    assert lab(losses, "--seeds", "3", "--rows", "one,three") == 0  # without the control
    assert "Differences" not in (tmp_path / "lab/page/index.md").read_text()
    study(tmp_path, rows=ROWS | {"two": ROWS["two"] | {"published": {"loss": 2.0}}}, control="two", **changes)
    assert lab(losses, "--seeds", "3") == 0
    page = (tmp_path / "lab/page/index.md").read_text()
    assert "in brackets the paper's number" in page and "\n\n| row | loss |\n" in page  # the first measure


def test_a_loss_that_is_not_finite_has_no_perplexity(lab: Lab, tmp_path: Path) -> None:
    """Neither has one whose exponential is no float: it would be finite, and decide the claim."""
    claim = {"text": "One is better", "test": "perplexity(one) < perplexity(two)"}
    study(tmp_path, measures={"perplexity": {"metric": "val/lm_loss", "exponential": True}}, claims=[claim])
    losses: dict[str, float | None] = {"one-1": 1.0, "one-2": 1.1, "one-3": 1.2}
    losses |= {"two-1": math.inf, "two-2": math.nan, "two-3": 1e4}
    assert lab(losses, "--seeds", "3") == 0
    found = results(tmp_path)
    [comparison] = found["claims"][0]["comparisons"]
    assert comparison["differences"] == {} and found["claims"][0]["verdict"] == "not measured"
    values = found["rows"]["two"]["measures"]["perplexity"]
    assert not any(map(math.isfinite, values["seeds"].values())) and values["std"] is None
    assert found["rows"]["one"]["measures"]["perplexity"]["seeds"]["1"] == math.e


def test_the_file_of_choices_is_plain(lab: Lab, tmp_path: Path) -> None:
    """What it holds by name; a value may be null."""
    study(tmp_path, TUNING | {"key": "optimizer.ema", "values": [0.9, None]})
    assert lab({"tuning-two-1": 2.0}) == 0
    kept = json.loads((tmp_path / "lab/tasks" / TUNED).read_text())["two"]
    assert kept["values"] == [0.9, None] and kept["index"] == 1 and kept["losses"] == [3.0, 2.0]
    configuration = yaml.safe_load((tmp_path / "lab/configurations/two-1.yaml").read_text())
    assert configuration["optimizer"]["ema"] is None


def test_configurations_are_written_again_and_compared(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of tuning and study, with the tuned values, in any folder; a changed study is named."""
    assert lab({"tuning-two-1": 2.0}) == 0
    digests = results(tmp_path)["configurations"]
    ran = {path.name: path.read_text() for path in (tmp_path / "lab/configurations").iterdir()}
    assert {f"{name}.yaml" for name in digests} == {*ran} and len(ran) == 6
    call_of = [str(tmp_path / "study.yaml"), "--output", str(tmp_path / "again"), "--configurations"]
    assert call("lab", [*call_of, str(tmp_path / "lab/page/results.json")]) == 0
    again = {path.name: path.read_text() for path in (tmp_path / "again/configurations").iterdir()}
    assert again == {
        name: text.replace(str(tmp_path / "lab"), str(tmp_path / "again")) for name, text in ran.items()
    }
    assert not (tmp_path / "again/runs").exists()
    capsys.readouterr()
    assert call("lab", [*call_of, str(tmp_path / "lab/page/results.json"), "optimizer.beta1=0.8"]) == 1
    assert "two-1: not the configuration of " in capsys.readouterr().out
    (tmp_path / "other.json").write_text("{}")
    assert call("lab", [*call_of, str(tmp_path / "other.json")]) == 2
    assert "is no results.json of a study" in capsys.readouterr().err
