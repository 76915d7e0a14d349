"""A study from its YAML to its page: what is run and what is not, what fails, mistakes in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megamoe.apps.lab.checks import rows_that_cannot_run
from megamoe.apps.lab.claims import Claim, Comparison, parse_claim
from megamoe.apps.lab.measures import _taken, consistency, spikes
from megamoe.apps.lab.page import _tuning
from megamoe.apps.lab.plan import load_plan
from megamoe.apps.lab.results import tuning_of
from megamoe.apps.lab.runner import Runner
from megamoe.apps.lab.study import Measure, load_study
from megamoe.apps.lab.tasks import Task, study_tasks, tuning_tasks
from megamoe.cli import call
from megamoe.config.files import merge
from megamoe.config.load import configure
from megamoe.metrics.names import LOAD, of_layer
from megamoe.validation.run import section_problems
from tests.support.apps.study_data import make_study_data
from tests.support.refusals import Case, cases
from tests.support.tiny import ROOT

STUDIES = sorted((ROOT / "examples/studies").glob("*.yaml"))
IN_MAKE_TEST = ("deepseek_balance", ["bias"])  # one process: each takes seconds to import its libraries
PLANNED = {"chi2022_table3", "tournament", "xie2022_table1"}  # in `make test`
RUN = {
    "data": {"mock": True, "sequence_length": 16},
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
    | {"vocab_size": 64},
    "moe": {"layers": {"every": 1}, "num_experts": 4, "expert_ffn_hidden_size": 8},
    "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 2},
    "evaluation": {"every": 4, "batches": 1},
    "checkpoint": {"every": 1},
}
STUDY: dict[str, Any] = {
    "title": "One expert or two",
    "source": "by hand",
    "rows": {
        "one": {"base": "run.yaml", "set": {"moe": {"router": {"selector": {"k": 1, "weights": "raw"}}}}},
        "two": {"base": "run.yaml", "published": {"loss": 4.0}},
        "two_again": {"base": "run.yaml", "set": {"differences": ["moe: two experts"]}},
    },
    "stages": {"routing": {"analyze": {"analyses": ["required"]}}},
    "measures": {
        "loss": {"metric": "val/lm_loss"},
        "perplexity": {"metric": "val/lm_loss", "exponential": True},
        "experts": {"metric": "moe/experts_per_token"},
        "flops": {"fact": "flops_per_token"},
        "memory": {"fact": "memory"},
        "required": {"stage": "routing", "path": "checkpoints/-1/analyses/required/*/0.9/mean"},
    },
    "claims": [{"text": "Two compute more", "test": "flops(one) < flops(two) and experts(two) > 1.5"}],
    "sizes": {"smoke": {"seeds": [1, 2], "time": "seconds"}},
}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    (folder / "task.yaml").write_text("{name: labels, kind: classification, train: a.tsv, test: {en: b.tsv}}")
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY | changes, sort_keys=False))
    return folder / "study.yaml"


@pytest.mark.full
def test_a_study_from_its_yaml_to_its_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two rows of one configuration share their runs; a second call runs nothing."""
    output = tmp_path / "lab"
    arguments = [str(written(tmp_path)), "--output", str(output), "--workers", "2"]
    assert call("lab", arguments) == 0
    shown = capfd.readouterr().out
    assert "0 of 8 tasks" in shown or "1 of 8 tasks" in shown  # 4 runs and as many analyses, not 6
    results = json.loads((output / "page/results.json").read_text())
    rows, (claim,) = results["rows"], results["claims"]
    assert claim["verdict"] == "seen" and len(claim["comparisons"]) == 2
    assert rows["two"]["measures"] == rows["two_again"]["measures"]
    assert rows["one"]["measures"]["experts"]["mean"] == 1 and rows["two"]["measures"]["experts"]["mean"] == 2
    records = [json.loads(line) for line in (output / "runs/two-2/metrics.jsonl").read_text().splitlines()]
    assert rows["two"]["measures"]["loss"]["seeds"]["2"] == records[-1]["val/lm_loss"]
    assert 1 <= rows["one"]["measures"]["required"]["mean"] <= 4
    assert rows["one"]["measures"]["memory"]["mean"] > 1e7
    # By hand, 3 passes of 2 FLOPs a product: attention 4 H^2 + T H, router H E, experts k 3 H F, output H V.
    of_token = 3 * 2 * (4 * 16**2 + 16 * 16 + 16 * 4 + 2 * 3 * 16 * 8 + 16 * 64)
    assert rows["two"]["measures"]["flops"]["mean"] == pytest.approx(of_token, rel=0.15)
    page = (output / "page/index.md").read_text()
    assert "| two | " in page and "[4]" in page and "| seen |" in page and "not complete" not in page
    assert "\n- moe: two experts (two_again)\n" in page
    assert [*results["configurations"]] == ["one", "two", "two_again"]
    assert call("lab", arguments) == 0
    assert " tasks" not in capfd.readouterr().out


def test_what_the_runner_does_with_tasks_that_fail_or_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Python without a model: kill -9 once is repeated, twice is a failure, as is what needs the task.

    In a step of Slurm with several tasks, the lab's processes are no ranks of it.
    """
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    dies = "import os, pathlib, sys; assert 'SLURM_STEP_NUM_TASKS' not in os.environ; "
    dies += "assert os.environ['LAUNCHED']; "
    dies += "at = pathlib.Path(sys.argv[1]); "
    dies += "n = len(at.read_text()) if at.exists() else 0; at.write_text('x' * (n + 1)); "
    dies += "n < int(sys.argv[2]) and os.kill(os.getpid(), 9)"

    def task(name: str, times: int, needs: tuple[str, ...] = ()) -> Task:
        arguments = ("-c", dies, str(tmp_path / f"{name}.count"), str(times))
        return Task(name, tmp_path / "stages" / name, arguments, name, needs)

    wrong = Task("wrong", tmp_path / "stages/wrong", ("-c", "raise SystemExit('error: no data')"), "wrong")
    needing = task("after", 0, ("twice",)), task("last", 0, ("once",))
    tasks = [task("once", 1), task("twice", 2), *needing, wrong]
    lines: list[str] = []
    launcher = ["env", "LAUNCHED=1"]
    runner = Runner(tmp_path, [None, None], lines.append, launcher=launcher)
    runner.run(tasks)
    found = {each.name: runner.record(each) for each in tasks}
    assert {name: record.state for name, record in found.items()} == {
        **{"once": "done", "twice": "failed", "after": "failed", "last": "done", "wrong": "failed"}
    }
    assert "once: ended by signal 9; once more" in lines
    assert found["twice"].problem.startswith("ended by signal 9")
    assert found["after"].problem == "twice is not complete"
    assert found["wrong"].problem == "error: no data (exit code 1)"
    # The next call: what failed is tried again, and no other.
    Runner(tmp_path, [None], lines.append, launcher=launcher).run(tasks)
    assert (tmp_path / "twice.count").read_text() == "xxx" and (tmp_path / "once.count").read_text() == "xx"
    assert runner.is_done(tasks[1]) and runner.is_done(tasks[2]) and not runner.is_done(wrong)


def test_a_task_that_is_timed_runs_alone(tmp_path: Path) -> None:
    runner = Runner(tmp_path, [None, None], print)
    first, second = (Task(name, tmp_path, (), name) for name in ("first", "second"))
    timed = Task("timed", tmp_path, (), "timed", alone=True)
    assert runner._next([timed, first], []) is timed
    assert runner._next([timed, second], [SimpleNamespace(task=first)]) is second  # type: ignore[list-item]
    assert runner._next([timed], [SimpleNamespace(task=first)]) is None  # type: ignore[list-item]
    assert runner._next([first], [SimpleNamespace(task=timed)]) is None  # type: ignore[list-item]


@pytest.mark.full
def test_a_failed_run_is_a_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = {"good": {"base": "run.yaml"}, "bad": {"base": "run.yaml", "set": {"data": {"mock": False}}}}
    (tmp_path / "broken.idx").write_text("no index")
    rows["bad"]["set"]["data"]["sources"] = [str(tmp_path / "broken")]  # type: ignore[index]
    measures = {"loss": {"metric": "val/lm_loss"}}
    path = written(tmp_path, rows=rows, measures=measures, claims=[], stages={})
    output = tmp_path / "lab"
    assert call("lab", [str(path), "--output", str(output), "--seeds", "1", "--workers", "1"]) == 1
    shown = capfd.readouterr().out
    assert "failed: bad-1: error: " in shown and "row bad cannot run: " in shown
    results = json.loads((output / "page/results.json").read_text())
    assert results["rows"]["good"]["failed"] == [] and results["rows"]["good"]["measures"]["loss"]["mean"]
    assert len(results["rows"]["bad"]["failed"]) == 1
    assert "| bad | failed |" in (output / "page/index.md").read_text()


def test_rows_whose_data_is_wrong_are_named_before_the_first_run(tmp_path: Path) -> None:
    (tmp_path / "broken.idx").write_text("no index")
    broken = {"base": "run.yaml", "set": {"data": {"mock": False, "sources": [str(tmp_path / "broken")]}}}
    rows = {"good": {"base": "run.yaml"}, "bad": broken}
    (line,) = rows_that_cannot_run(load_plan(written(tmp_path, rows=rows, claims=[]), "smoke", None, []))
    assert line.startswith("row bad cannot run: data")


@pytest.mark.full
def test_a_lab_that_is_killed_goes_on(tmp_path: Path) -> None:
    """kill -9 of the lab while a run trains: the next call resumes it and ends with the same metrics."""
    path = written(tmp_path, claims=[], stages={}, measures={"loss": {"metric": "val/lm_loss"}})
    command = [sys.executable, "-m", "megamoe.cli", "lab", str(path), "--workers", "1", "train.steps=60"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*command, "--output", str(whole)], cwd=ROOT, check=True, capture_output=True)
    lab = subprocess.Popen([*command, "--output", str(broken)], cwd=ROOT, stdout=subprocess.DEVNULL)
    metrics = broken / "runs/one-1/metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(lab.pid, signal.SIGKILL)
    lab.wait()
    assert json.loads((broken / "tasks/one-1.json").read_text())["state"] == "started"
    subprocess.run([*command, "--output", str(broken)], cwd=ROOT, check=True, capture_output=True)
    found = [json.loads((folder / "page/results.json").read_text())["rows"] for folder in (whole, broken)]
    assert found[0]["one"]["measures"]["loss"] == found[1]["one"]["measures"]["loss"]


def test_two_labs_in_one_folder_and_a_changed_study_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megamoe.apps.lab import command

    monkeypatch.setattr(command, "WAIT_S", 0.0)
    path, output = written(tmp_path), tmp_path / "lab"
    lock = command._open_folder(output, overwrite=False)
    try:
        assert call("lab", [str(path), "--output", str(output)]) == 2
        assert f"another lab, or a run of it, holds {output}" in capsys.readouterr().err
    finally:
        os.close(lock)
    (output / "tasks").mkdir()
    record = {"identity": "another", "state": "done"}
    (output / "tasks/one-1.json").write_text(json.dumps(record))
    assert call("lab", [str(path), "--output", str(output)]) == 2
    told = capsys.readouterr().err
    assert "one-1 was started with another configuration" in told and "--overwrite" in told
    (output / "tasks/one-1.json").unlink()
    (output / "tasks/routing-one-1.json").write_text(json.dumps(record))  # which costs no training
    assert call("lab", [str(path), "--output", str(output)]) == 2
    told = capsys.readouterr().err
    assert f"delete it and {output}/stages/routing/one-1, and the stage is run again" in told
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    assert call("lab", [str(path), "--output", str(tmp_path / "other")]) == 2
    assert "holds no study" in capsys.readouterr().err


@pytest.mark.parametrize("case", cases("lab"))
def test_mistakes_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Case, expect_message: Callable[..., None]
) -> None:
    """What is changed, in YAML, of a study of one measure `loss`; LONG is a long name."""
    usual = {"claims": [], "measures": {"loss": {"metric": "val/lm_loss"}}}
    path = written(tmp_path, **(usual | yaml.safe_load(case["changes"].replace("LONG", "x" * 5000))))
    assert call("lab", [str(path), "--output", str(tmp_path / "lab")]) == 2
    expect_message(case, re.sub("x{99,}", "LONG", capsys.readouterr().err))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in PLANNED else pytest.mark.full) for path in STUDIES],
    ids=lambda path: path.stem,
)
def test_every_study_can_be_planned(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    languages = tmp_path / "data/papers/bilingual"  # a study may name all datasets of a folder
    languages.mkdir(parents=True)
    (languages / "de.idx").touch()
    monkeypatch.chdir(tmp_path)
    for size in load_study(path).sizes:
        plan = load_plan(path, size, None, [])
        assert len(study_tasks(plan, tmp_path, {}).training) == len(plan.configs) * len(plan.size.seeds)
        assert bool(tuning_tasks(plan, tmp_path)[1]) == (plan.size.tuning is not None)
        assert plan.claims
        rows = [[tree, plan.study.rows[row].finetune] for row, tree in plan.configs.items()]
        assert all(rows.count(row) == 1 for row in rows)  # a claim of two equal rows could not fail
        assert any(measure.fact == "flops_per_token" for measure in plan.study.measures.values())
        # What is tuned by is not reported, but for the validation loss over the steps of Xie 2022, figure 4.
        assert set((tuning_of(plan) or {}).get("reported", ())) <= {"overfitting"}
        for row, tree in plan.configs.items():
            config = configure(merge(tree, {}), [])
            assert not [*section_problems(config, plan.size.ranks, None)], (size, row)


def test_no_row_that_a_claim_expects_to_be_better_is_tuned_alone() -> None:
    """Of two compared rows the one that is expected to be worse is tuned, or both, or none."""
    lower = {"perplexity", "loss", "mean_loss", "at_100", "at_25"}
    for path in STUDIES:
        study = load_study(path)
        tuned = {*(study.tuned_rows or study.rows)}
        for claim in study.claims:
            for each in parse_claim(claim.test, "").comparisons:
                sides = [
                    {*Claim([Comparison("", side, side)]).operands()} for side in (each.left, each.right)
                ]
                measures = {measure for side in sides for measure, _ in side}
                if measures <= lower or all(
                    name.startswith(("bleu", "accuracy", "chrf")) for name in measures
                ):
                    better, worse = (
                        {row for _, row in side} for side in sides[:: 1 if measures <= lower else -1]
                    )
                    assert not better & tuned or worse <= tuned, (path.stem, each.text)


def test_a_routing_space_of_moec_has_half_as_many_dimensions_as_experts() -> None:
    """Table 6 of Xie et al. 2022, for 16 to 128 experts; null is half of them."""
    plan = load_plan(ROOT / "examples/studies/xie2022_table4.yaml", "cpu", None, [])
    assert len(plan.configs) == 8
    assert {tree["moe"]["router"]["scorer"]["routing_dim"] for tree in plan.configs.values()} == {None}


def test_experts_of_a_larger_size_keep_their_share_of_the_dense_ffn() -> None:
    for name in ("yang2024_table1", "tournament", "xie2022_table2", "chi2022_table1"):
        path = ROOT / f"examples/studies/{name}.yaml"
        small, large = (load_plan(path, size, None, []).configs for size in ("cpu", "gpu"))
        for row, tree in small.items():
            shares = [
                of_size[row]["moe"]["expert_ffn_hidden_size"] / of_size[row]["model"]["ffn_hidden_size"]
                for of_size in (small, large)
                if "expert_ffn_hidden_size" in tree.get("moe", {})
            ]
            assert len(set(shares)) < 2, (name, row, shares)


@pytest.fixture(scope="module")
def study_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    make_study_data(folder)
    return folder


@pytest.mark.parametrize(
    ("path", "only"),
    [
        *(pytest.param(path, None, marks=pytest.mark.full, id=path.stem) for path in STUDIES),
        pytest.param(ROOT / f"examples/studies/{IN_MAKE_TEST[0]}.yaml", IN_MAKE_TEST[1], id="a_row"),
    ],
)
def test_every_study_to_its_page(
    path: Path, only: list[str] | None, study_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data of bytes in place of what the study needs: all runs end, each measure has a number."""
    monkeypatch.chdir(study_data)
    chosen = ["--rows", ",".join(only)] if only else []
    assert call("lab", [str(path), "--output", str(tmp_path / "lab"), *chosen]) == 0
    results = json.loads((tmp_path / "lab/page/results.json").read_text())
    assert not [line for row in results["rows"].values() for line in row["failed"]]
    assert only is None or [*results["rows"]] == only
    rows = results["rows"].values()
    for name in load_study(path).measures:  # such as a path in the JSON of a stage
        assert any(row["measures"][name]["seeds"] for row in rows), name


def test_rows_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claims of other rows are left out; a row that the study has not is a mistake."""
    path = written(tmp_path)
    assert [*load_plan(path, "smoke", None, [], ["two"]).configs] == ["two"]
    assert load_plan(path, "smoke", None, [], ["two"]).claims == []
    assert len(load_plan(path, "smoke", None, [], ["two", "one"]).claims) == 1
    assert call("lab", [str(path), "--output", str(tmp_path / "lab"), "--rows", "two,three"]) == 2
    assert "rows: found 'three', expected one, two, two_again" in capsys.readouterr().err


def test_spikes_by_hand() -> None:
    flat = [1.0, 1.01] * 15
    assert spikes(flat) == 0
    assert spikes([*flat, 3.0, *flat]) == 1
    assert spikes([*flat, float("nan")]) == 1


def test_what_is_taken_of_the_values_of_a_run() -> None:
    def taken(take: str) -> float | None:
        run = SimpleNamespace(
            rows=[{"step": at, "val/lm_loss": loss} for at, loss in enumerate([3.0, 1.0, 1.5])]
        )
        return _taken(Measure(metric="val/lm_loss", take=take), run)  # type: ignore[arg-type]

    found = {take: taken(take) for take in ("first", "last", "lowest", "highest", "rise")}
    assert found == {"first": 3.0, "last": 1.5, "lowest": 1.0, "highest": 3.0, "rise": 0.5}


def test_consistency_of_windows() -> None:
    """Three runs of 5 steps and two MoE layers, in windows of 2 steps: the fifth step is left out."""
    load_RSLE = np.random.default_rng(0).integers(0, 50, (3, 5, 2, 4))
    keys = [of_layer(layer)[LOAD] for layer in (2, 11)]
    runs = [
        [
            {"step": step + 1, **dict(zip(keys, of_step.tolist(), strict=True))}
            for step, of_step in enumerate(of_run)
        ]
        for of_run in load_RSLE
    ]
    runs[1].insert(1, {"step": 1, "val/lm_loss": 2.0})  # a record without loads is no step
    expected = []
    for first in (0, 2):
        load_RLE = load_RSLE[:, first : first + 2].sum(1)
        layers = [np.corrcoef(load_RLE[:, layer]).mean() for layer in range(2)]
        expected.append((first + 2, pytest.approx(np.mean(layers))))
    assert consistency(runs, 2) == expected
    ((step, whole),) = consistency(runs, 100)  # more than there are: one window of all steps
    assert step == 5 and whole not in [value for _, value in expected]
    assert consistency(runs[:1], 2) == [] and consistency([], 2) == []
    level = [{"step": 1, **{key: [2, 2, 2, 2] for key in keys}}]
    assert consistency([runs[0], level], 2) == [] and consistency([[{"step": 1}]] * 2, 2) == []


def test_seeds_of_a_fine_tuning(tmp_path: Path) -> None:
    """By default that of the pretraining; the study's own go before it, and the size's before these."""
    stages = {"tuned": {"finetune": {"task": "task.yaml"}}}
    measures = {"ic": {"stage": "tuned", "consistency": 10}, "loss": {"metric": "val/lm_loss"}}
    for settings, size, seeds in (
        ({}, {}, "[3]"),
        ({"seeds": [1, 2]}, {}, "[1, 2]"),
        ({}, {"seeds": [7]}, "[7]"),
    ):
        stages["tuned"]["finetune"]["set"] = settings  # type: ignore[assignment]
        sizes = {"smoke": {"seeds": [3], "time": "seconds", "finetune": size}}
        path = written(tmp_path, stages=stages, sizes=sizes, measures=measures, claims=[])
        tasks = study_tasks(load_plan(path, "smoke", None, []), tmp_path / "lab", {})
        assert f"task.seeds={seeds}" in tasks.stages["tuned", "one", 3].arguments


def test_the_stages_of_a_study(tmp_path: Path) -> None:
    """A stage of some rows, and the number of samples of a size in all of them."""
    stages = {
        "tuned": {"rows": ["two"], "finetune": {"task": "task.yaml"}},
        "swept": {
            "rows": ["one", "two"],
            "alone": True,
            "evaluate": {"sweep": {"moe.router.selector.k": [1, 2]}},
        },
    }
    sizes = {"smoke": {"seeds": [1, 2], "time": "seconds", "samples": 2}}
    measures = {
        "k_2": {"stage": ["swept", "tuned"], "path": "1/perplexity"},
        "balance": {"stage": "tuned", "metric": "moe/imbalance"},
        "loss": {"metric": "val/lm_loss"},
    }
    path = written(tmp_path, stages=stages, sizes=sizes, measures=measures, claims=[])
    tasks = study_tasks(load_plan(path, "smoke", None, []), tmp_path / "lab", {})
    assert {key for key in tasks.stages if key[0] == "tuned"} == {("tuned", "two", 1), ("tuned", "two", 2)}
    assert "task.seeds=[2]" in tasks.stages["tuned", "two", 2].arguments
    swept = tasks.stages["swept", "one", 1].arguments
    assert swept[swept.index("--samples") + 1] == "2" and "moe.router.selector.k=1,2" in swept
    assert ("swept", "two_again", 1) not in tasks.stages and tasks.stages["swept", "one", 1].alone
    assert tasks.stages["tuned", "two", 2].needs == ("two-2",)


def test_a_value_at_the_end_of_the_tuned_ones_is_named() -> None:
    rule = {"key": "optimizer.lr", "values": [1, 2, 4], "seed": 0, "by": "val/lm_loss"}
    inside = _tuning({"tuning": rule, "rows": {"a": {"tuned": 2}}})
    outside = _tuning({"tuning": rule, "rows": {"a": {"tuned": 2}, "b": {"tuned": 4}}})
    added_later = _tuning(
        {"tuning": rule | {"values": [2, 4, 1]}, "rows": {"a": {"tuned": 2}, "b": {"tuned": 4}}}
    )
    assert added_later == outside and " is that of 1, 2, 4 " in outside
    assert "beyond" not in inside and "that the table does not report." in inside
    reported = _tuning({"tuning": rule | {"reported": ["rise"]}, "rows": {"a": {"tuned": 2}}})
    assert reported.endswith("that the table does not report, except in rise.")
    assert outside == inside + " The best one may lie beyond them, because the first or last was taken: b."
