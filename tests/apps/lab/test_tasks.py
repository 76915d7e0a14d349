"""Identities of tasks: of all that decides a result, and of nothing else; GPUs and threads of processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.lab.command import _slots
from megamoe.apps.lab.plan import load_plan
from megamoe.apps.lab.runner import Runner
from megamoe.apps.lab.tasks import Task, Tasks, study_tasks, tuning_tasks
from megamoe.errors import UserError
from tests.apps.lab.test_lab import written
from tests.support.tiny import ROOT

KEPT = {  # of yang2024_table1 at size cpu, a learning rate of 0.002
    "dense-1": "565fa2646ca8cca5",
    "switch-2": "be6b22f217e00642",
    "xmoe_64-3": "ec2b25bfdd42316f",
    "tuning-dense-0": "ce2837a0d2405e9c",
    "tuning-switch-2": "8f56f7e6e3a448ca",
}
LABELS = {"labels": {"finetune": {"task": "task.yaml", "set": {"epochs": 2}}}}


def tasks_of(path: Path, output: Path = Path("e")) -> Tasks:
    return study_tasks(load_plan(path, "smoke", None, []), output, {})


def stage_of(path: Path, name: str, **stages: Any) -> Task:
    changes = {"measures": {"loss": {"metric": "val/lm_loss"}}, "claims": []}
    return tasks_of(written(path, stages=stages, **changes)).stages[name, "one", 1]


def test_the_identity_of_training_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with runs of earlier versions can be continued. A change of these recipes changes them too."""
    monkeypatch.chdir(ROOT)
    plan = load_plan(Path("examples/studies/yang2024_table1.yaml"), "cpu", None, [])
    training = study_tasks(plan, tmp_path, dict.fromkeys(plan.configs, 0.002)).training
    tuning = tuning_tasks(plan, tmp_path)[0].by_name
    found = {task.name: task.identity for task in (*training.values(), *tuning.values())}
    assert {name: found[name] for name in KEPT} == KEPT and len(found) == 36


def test_what_stops_a_launch_is_not_of_the_run(tmp_path: Path) -> None:
    path, stop = written(tmp_path), ["train.exit_after_steps=2", "train.exit_after_minutes=5"]
    plain, stopped = (
        study_tasks(load_plan(path, "smoke", None, overrides), Path("e"), {}).training["one", 1]
        for overrides in ([], stop)
    )
    assert stopped.identity == plain.identity and stopped.configuration == plain.configuration
    assert stopped.arguments == (*plain.arguments, *stop)


def test_the_identity_of_fine_tuning_is_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stage_of(tmp_path, "labels", **LABELS).identity
    task = (tmp_path / "task.yaml").read_text()
    plan = load_plan(tmp_path / "study.yaml", "smoke", None, [])
    (tmp_path / "task.yaml").write_text(f"# a comment\n{task}")
    assert study_tasks(plan, Path("e"), {}).stages["labels", "one", 1].identity == first
    (tmp_path / "task.yaml").write_text(task.replace("a.tsv", "c.tsv"))
    assert study_tasks(plan, Path("e"), {}).stages["labels", "one", 1].identity != first
    (tmp_path / "task.yaml").write_text(task)
    monkeypatch.chdir(tmp_path)  # the path of the study, and of the output, decides nothing
    relative = tasks_of(Path("study.yaml"), tmp_path / "other")
    assert relative.stages["labels", "one", 1].identity == first
    assert (
        relative.training["one", 1].identity == tasks_of(tmp_path / "study.yaml").training["one", 1].identity
    )
    (tmp_path / "task.yaml").unlink()
    with pytest.raises(UserError, match=r"stages\.labels\.finetune\.task: cannot read"):
        tasks_of(Path("study.yaml"))


def test_settings_of_fine_tuning_decide(tmp_path: Path) -> None:
    """With a name of the output that arguments of stages begin with."""
    found = [
        stage_of(tmp_path, "labels", labels={"finetune": {"task": "task.yaml", "set": {"epochs": epochs}}})
        for epochs in (2, 3)
    ]
    assert found[0].identity != found[1].identity
    swept = [
        stage_of(tmp_path, "swept", swept={"evaluate": {"sweep": {"evaluation.batches": values}}})
        for values in ([1], [2])
    ]
    assert swept[0].identity != swept[1].identity


def test_which_checkpoints_are_analysed_decides(tmp_path: Path) -> None:
    found = {
        of: stage_of(tmp_path, "routing", routing={"analyze": {"analyses": ["required"], "of": of}})
        for of in ("last", "all")
    }
    assert found["last"].identity != found["all"].identity
    assert found["all"].checkpoints_of is not None and found["all"].arguments[-2] == "--output"
    assert found["last"].arguments[-1] == "e/runs/one-1"
    both = {"analyze": {"analyses": ["required"]}}, {"analyze": {"analyses": ["required"], "of": "all"}}
    stage_of(tmp_path, "last", last=both[0], every=both[1])
    assert {"last-one-1", "every-one-1"} <= set(tasks_of(tmp_path / "study.yaml").by_name)


def test_the_identity_of_a_run_holds_its_deepspeed_file(tmp_path: Path) -> None:
    path, file = written(tmp_path), tmp_path / "zero.json"
    plain = tasks_of(path).training["two", 1].identity
    file.write_text('{"zero_optimization": {"stage": 1}}')
    path = written(tmp_path, set={"parallel": {"deepspeed": str(file)}})
    first = tasks_of(path).training["two", 1].identity
    file.write_text('{"zero_optimization": {"stage": 2}}')
    second = tasks_of(path).training["two", 1].identity
    assert len({plain, first, second}) == 3
    file.unlink()
    with pytest.raises(UserError, match=r"row one: parallel\.deepspeed: cannot read"):
        tasks_of(path)


def test_the_identity_of_a_run_holds_the_content_of_its_plugins(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    plain, found = tasks_of(written(tmp_path)).training["two", 1].identity, []
    for folder, text in ((tmp_path, "x = 1"), (tmp_path / "elsewhere", "x = 1"), (tmp_path, "x = 2")):
        (folder / "idle.py").write_text(text)
        path = written(tmp_path, set={"plugins": [str(folder / "idle.py")]})
        found.append(tasks_of(path).training["two", 1].identity)
    assert found[0] == found[1] and len({plain, *found}) == 3
    written(tmp_path, set={"plugins": ["idle.py"]})  # beside the study
    assert tasks_of(path).training["two", 1].identity == found[2]


def test_a_shared_run_has_one_name_whatever_rows_a_call_names(tmp_path: Path) -> None:
    """Otherwise `--rows` trains it once more."""
    rule = {"key": "optimizer.lr", "values": [0.1, 0.2]}
    path = written(tmp_path, sizes={"smoke": {"seeds": [1], "time": "seconds", "tuning": rule}})
    again = load_plan(path, "smoke", None, [], ["two_again"])
    output, tuned = tmp_path / "lab", {"two": 0.2, "two_again": 0.2}
    tasks = study_tasks(again, output, tuned)
    assert tasks.training["two_again", 1].name == "two-1" and [*tasks.training] == [("two_again", 1)]
    assert tasks.stages["routing", "two_again", 1].folder == output / "stages/routing/two-1"
    assert [*tuning_tasks(again, output)[0].by_name] == ["tuning-two-0", "tuning-two-1"]


def test_a_row_that_is_not_run_may_have_mistakes(tmp_path: Path) -> None:
    path = written(tmp_path, rows={"wrong": {"base": "nowhere.yaml"}, "two": {"base": "run.yaml"}}, claims=[])
    assert [*load_plan(path, "smoke", None, [], ["two"]).all_configs] == ["two"]
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_plan(path, "smoke", None, [])


def test_factors_of_a_size(tmp_path: Path) -> None:
    """Keys of any depth; what a row does not have stays its default."""
    scale = {"moe.router.selector.k": 2, "data.sequence_length": 3, "optimizer.lr": 2, "model.num_layers": 2}
    rows = {"one": {"base": "run.yaml", "set": {"moe": {"router": {"selector": {"k": 1}}}}}}
    rows["two"] = {"base": "run.yaml", "set": {"optimizer": {"lr": 0.25}, "moe": 5}}  # refused later
    sizes = {"smoke": {"seeds": [1], "time": "seconds", "scale": scale}}
    one, two = load_plan(
        written(tmp_path, rows=rows, sizes=sizes, claims=[]), "smoke", None, []
    ).configs.values()
    assert one["moe"]["router"]["selector"]["k"] == 2 and "optimizer" not in one
    assert two["optimizer"]["lr"] == 0.5 and two["moe"] == 5
    assert {tree["data"]["sequence_length"] for tree in (one, two)} == {48}


@pytest.mark.parametrize(
    ("visible", "ranks", "workers", "slots"),
    [
        (None, 1, None, ["0", "1", "2", "3"]),
        ("6,7,GPU-12ab,9", 1, 3, ["6", "7", "GPU-12ab"]),
        ("6,7,GPU-12ab,9", 2, None, ["6,7", "GPU-12ab,9"]),
        ("4,5,6,7", 3, 8, ["4,5,6"]),
    ],
)
def test_slots_are_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ranks: int, workers: int | None, slots: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _slots(ranks, workers) == slots
    with pytest.raises(UserError, match=r"^ranks: a run of this size has 5, found 4 GPUs"):
        _slots(5, None)


def test_threads_share_the_cores_that_the_lab_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert Runner(tmp_path, [None] * 2, print, ranks=2).threads == 3
    assert Runner(tmp_path, [None] * 3, print).threads == 4
    assert Runner(tmp_path, [None] * 5, print, ranks=4).threads == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _slots(4, None) == [None] * 3 and _slots(16, None) == [None]
