"""Tuning: a value is chosen once, and a row that cannot be tuned is a row.

The runs are short programs that write a loss, or fail, as a file says.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megamoe.apps.lab import page as lab_page
from megamoe.apps.lab import runner as lab_runner
from megamoe.apps.lab import tasks as lab_tasks
from megamoe.apps.lab.plan import load_plan
from megamoe.apps.lab.runner import Runner
from megamoe.apps.lab.tasks import Task
from megamoe.apps.lab.tuning import TUNED, tune, values_of
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
(folder / "heartbeat.json").write_text(json.dumps({"step": 4, "steps": 4}))
(folder / "summary.json").write_text(json.dumps({"parameters_total": 1000 if name[0] == "o" else 2000}))
"""
TUNING: dict[str, Any] = {"key": "optimizer.lr", "values": [0.1, 0.2], "set": {"train": {"steps": 2}}}
ROWS: dict[str, Any] = {
    "one": {"base": "run.yaml", "set": {"moe": {"router": {"selector": {"k": 1, "weights": "raw"}}}}},
    "two": {"base": "run.yaml"},
}
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
    assert lab({"tuning-one-0": 1.0}, "--seeds", "2") == 0
    assert results(tmp_path)["rows"]["one"]["tuned"] == 0.2
    assert calls(tmp_path, "tuning-one-0") == calls(tmp_path, "one-1") == calls(tmp_path, "one-2") == 1
    assert json.loads((tmp_path / "lab/tasks" / TUNED).read_text()) == kept


def test_another_rule_chooses_anew(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab({"tuning-one-1": 2.0}) == 0
    study(tmp_path, TUNING | {"values": [0.1, 0.2, 0.3]})
    plan = load_plan(tmp_path / "study.yaml", "smoke", None, [])
    runner = Runner(tmp_path / "lab", [None], print)
    (tmp_path / "losses.json").write_text(json.dumps({"tuning-one-2": 1.0}))
    chosen, without = values_of(tune(plan, tmp_path / "lab", runner))
    assert chosen == {"one": 0.3, "two": 0.1} and without == []
    assert calls(tmp_path, "tuning-one-0") == calls(tmp_path, "tuning-one-2") == 1
    assert values_of(tune(plan, tmp_path / "lab", runner))[0] == chosen
    assert calls(tmp_path, "tuning-one-2") == 1
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
    assert "0.1, 0.2 whose runs of one and two, seed 0, ended with the lowest mean `val/lm_loss`" in page
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


def test_a_tuning_run_that_stopped_decides_nothing(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in ends with step 4: of the second value it may go on, and have the lowest loss."""
    study(tmp_path, {"key": "train.steps", "values": [4, 6]})
    assert lab({}) == 1
    told = capsys.readouterr().out
    assert "one: train.steps not tuned, so not trained" in told
    assert "failed: tuning-one-1: stopped at step 4 of 6" in told
    assert not (tmp_path / "lab/tasks" / TUNED).exists() and not calls(tmp_path, "one-1")


def test_a_half_trained_run_has_no_number(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in ends with step 4, as train.exit_after_steps=4 does."""
    study(tmp_path, None)
    assert lab({}, "train.steps=6") == 1
    told = capsys.readouterr().out
    assert "failed: one-1: stopped at step 4 of 6; the same command goes on with it" in told
    assert results(tmp_path)["claims"][0]["verdict"] == "not measured"


def test_the_page(lab: Lab, tmp_path: Path) -> None:
    """The control's table, remarks, sizes of the runs, seeds of a claim; when there are brackets."""
    measures = {
        "loss": {"metric": "val/lm_loss", "digits": 1},
        "perplexity": {"metric": "val/lm_loss", "exponential": True},
    }
    claims = [CLAIM, {"text": "And in perplexity", "test": "perplexity(one) < perplexity(two)"}]
    remarks = ["First remark.", "Second remark."]
    changes: dict[str, Any] = {"measures": measures, "claims": claims, "remarks": remarks}
    rows = ROWS | {"three": {"base": "run.yaml", "set": {"optimizer": {"min_lr": 0.01}}}}
    study(tmp_path, rows=rows, control="two", compare=["loss", "perplexity"], **changes)
    losses: dict[str, float | None] = {"one-1": 1.0, "one-2": 1.1, "one-3": None}
    losses |= {"two-1": 2.0, "two-2": 2.1, "two-3": 2.2, "three-1": 2.5, "three-2": 2.6, "three-3": 2.7}
    assert lab(losses, "--seeds", "3") == 1
    page = (tmp_path / "lab/page/index.md").read_text()
    assert "in brackets the paper's" not in page and "over the seeds.\n" in page
    assert page.index("## Claims") < page.index("\n\nFirst remark.\n\nSecond remark.\n\n## Numbers")
    # All seeds are on its side, but one is missing.
    assert (
        "| `loss(one) < loss(two)` | 1.0000 | 1.0000 to 1.0000 | 2 of 3 | undecided: 1 of 3 seeds missing |"
        in page
    )
    assert "## Differences from two\n\n| row | loss | perplexity |" in page
    assert "| one | -1.00 (-1.00 to -1.00), 2 of 3 seeds | " in page
    assert "| three | 0.50 (0.50 to 0.50) | " in page and "| two | 0" not in page
    assert "Parameters of a model: 1k to 2k; tokens of its training: 128." in page
    found = results(tmp_path)
    assert found["rows"]["one"]["parameters"] == 1000
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


def test_seeds_are_added_at_planned_looks_until_all_claims_are_decided(lab: Lab, tmp_path: Path) -> None:
    """The first look has 0.28 % of the error, so three seeds decide nothing; five do, by 1.76 %."""
    sizes = {"smoke": {"seeds": [1, 2, 3, 4, 5, 6, 7], "time": "seconds", "looks": [3, 5, 7]}}
    study(tmp_path, sizes=sizes)
    losses: dict[str, float | None] = {"one-1": 0.6, "one-2": 1.0, "one-3": 1.4, "one-4": 0.8, "one-5": 1.2}
    assert lab(losses) == 0
    assert calls(tmp_path, "one-5") == 1 and not calls(tmp_path, "one-6")
    assert results(tmp_path)["seeds"] == [1, 2, 3, 4, 5]
    page = (tmp_path / "lab/page/index.md").read_text()
    assert "| 98.24 % interval |" in page and "| 5 of 5 | seen |" in page and "after 3, 5, 7 seeds" in page
    sizes["smoke"]["looks"] = [3, 5]
    study(tmp_path, sizes=sizes)
    assert lab(losses) == 2


def test_what_the_seeds_of_a_study_can_show(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before others are run: by the spread of two seeds, whose losses differ by 0.1."""
    study(tmp_path, None, claims=[CLAIM | {"difference": 0.2, "margin": "5 %"}])
    assert lab({"one-1": 2.0, "one-2": 2.1}, "--seeds", "2") == 0
    pilot = str(tmp_path / "lab/page/results.json")
    capsys.readouterr()
    assert lab({}, "--seeds", "5", "--power", pilot) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `loss(one)")]
    assert row.startswith(
        "| `loss(one) < loss(two)` | 0.0707 to 0.2791 | 0.1189 to 0.4695 | 4 to 18 | 4 to 32 |"
    )
    (tmp_path / "other.json").write_text("{}")
    assert lab({}, "--power", str(tmp_path / "other.json")) == 2
    assert "--power: " in capsys.readouterr().err
