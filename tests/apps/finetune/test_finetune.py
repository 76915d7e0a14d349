"""Tuned models: every kind of task, layouts, resume, frozen experts, the choice of an epoch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.evaluation.trained_model import session
from megamoe.apps.finetune.finetune import finetune
from megamoe.apps.finetune.task import load_task
from megamoe.errors import ExitCode, UserError
from megamoe.train.loop import train
from tests.support.apps.tasks import MAKERS, make_task
from tests.support.checkpoint_files import read_tensors
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_config, ds_variant, small_run

MODEL: dict[str, Any] = {
    "name": "mlm",
    "model__architecture": "encoder",
    "model__vocab_size": 258,
    "model__num_attention_heads": 4,
    "model__head_transform": True,
    "moe__layers": {"at": [2], "insert_after": [1]},
    "data__document_aware": False,
    "data__sequence_length": 32,
    "train__objective": "masked",
    "train__steps": 1,
    "train__micro_batch_size": 2,
    "log__report": False,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"parallel__expert": 2}),
    "tp2": (2, {"parallel__tensor": 2}),
    "tp2_ep2": (2, {"parallel__tensor": 2, "parallel__expert": 2, "parallel__sequence": True}),
    "zero3": (2, {"parallel__expert": 2, "zero": 3}),
}


def layout(folder: Path, name: str) -> tuple[int, dict[str, Any]]:
    """Return the ranks and the changes of a layout, with its DeepSpeed file."""
    ranks, changes = LAYOUTS[name]
    changes = dict(changes)
    zero = changes.pop("zero", 0)
    file = f"zero{zero}_fp32"
    deepspeed = ds_variant(folder, file, zero_optimization=CUT_ALL) if zero == 3 else ds_config(file)
    return ranks, {**changes, "parallel__deepspeed": deepspeed}


def pretrained(pool: Pool, folder: Path, name: str) -> Path:
    """Train a masked model for a step at a layout; return the run's folder."""
    ranks, changes = layout(folder, name)
    pool.run(pretrain, {**MODEL, **changes, "output": str(folder / name)}, ranks=ranks, timeout_s=300)
    return folder / name / "mlm"


def pretrain(changes: dict[str, Any]) -> None:
    """Job: a run to its end."""
    train(small_run(**changes))


def tune(
    tasks: list[Path], checkpoint: Path, output: Path, overrides: list[str], overwrite: bool = False
) -> None:
    """Job: each task, into a folder of its name, in one world; overrides: of the task and of the runs."""
    layout = [each for each in overrides if each.startswith("parallel.")]
    of_task = [each for each in overrides if each.startswith("task.")]
    of_run = [each for each in overrides if not each.startswith("task.")]
    with session(layout) as ranks:
        for path in tasks:
            task, folder = load_task(path, of_task), output / path.parent.name
            code = finetune(task, ranks, checkpoint, folder, of_run, overwrite=overwrite)
            assert code is ExitCode.FINISHED


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def predictions(folder: Path, seed: int = 1) -> dict[str, list[Any]]:
    files = sorted((folder / f"seed_{seed}/predictions").glob("*.jsonl"))
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def losses(folder: Path) -> list[float]:
    lines = (folder / "seed_1/metrics.jsonl").read_text().splitlines()
    return [value for line in lines for key, value in json.loads(line).items() if key.endswith("loss")]


def assert_close(found: Any, expected: Any) -> None:
    """Equal but for numbers, which may differ by 1e-5."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, each in expected.items():
            assert_close(found[key], each)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    else:
        assert found == expected


@pytest.fixture(scope="module")
def mlm(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(pool, tmp_path_factory.mktemp("mlm"), "one")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tasks")
    return [make_task(folder, name) for name in MAKERS]


@pytest.fixture(scope="module")
def tuned(pool: Pool, mlm: Path, tasks: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of task, on one rank."""
    output = tmp_path_factory.mktemp("tuned")
    pool.run(tune, tasks, mlm, output, [], ranks=1, timeout_s=300)
    return output


def test_every_kind_is_trained_and_scored(tuned: Path) -> None:
    for name, make in MAKERS.items():
        found, predicted = results(tuned / name), predictions(tuned / name)
        sizes = {"valid": 5, "de": 7, "en": 3}
        assert {key: of_set["examples"] for key, of_set in found["sets"].items()} == sizes
        assert {key: len(rows) for key, rows in predicted.items()} == sizes
        assert all(score is None or -1 <= score <= 1 for score in found["seeds"]["1"]["sets"]["de"].values())
        for row, prediction in zip(make(8, 7), predicted["de"], strict=True):
            if name == "tagging":
                assert len(prediction["tags"]) == len(row["words"])
            if name == "question_answering":
                assert 0 <= prediction["start"] < prediction["end"] <= len(row["context"])
    accuracy = results(tuned / "classification")["seeds"]["1"]["sets"]["de"]["accuracy"]
    labels = [row["label"] for row in predictions(tuned / "classification")["de"]]
    right = [row["label"] == each for row, each in zip(MAKERS["classification"](8, 7), labels, strict=True)]
    assert accuracy == sum(right) / 7


@pytest.mark.full
def test_checkpoints_of_all_layouts_give_the_same(
    pool: Pool, tuned: Path, tasks: list[Path], tmp_path: Path
) -> None:
    """Save at each layout, and tune there too."""
    for name in LAYOUTS:
        ranks, changes = layout(tmp_path, name)
        checkpoint = pretrained(pool, tmp_path, name)
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        pool.run(tune, tasks, checkpoint, tmp_path / f"{name}_tuned", overrides, ranks=ranks, timeout_s=600)
        for path in tasks:
            mine, one = tmp_path / f"{name}_tuned" / path.parent.name, tuned / path.parent.name
            assert_close(losses(mine), losses(one))
            assert_close(results(mine)["sets"], results(one)["sets"])
            assert_close(predictions(mine), predictions(one))


def frozen_job(task: Path, checkpoint: Path, output: Path) -> None:
    """Job: with frozen routers and experts, at two weights of the balance loss."""
    for weight in (0.0, 5.0):
        override = f"moe.losses.switch_balance.weight={weight}"
        tune([task], checkpoint, output / f"{weight:g}", ["task.frozen=[router, experts]", override])


@pytest.mark.full
def test_frozen_routers_and_experts_stay_and_the_balance_loss_reaches_the_rest(
    pool: Pool, mlm: Path, tasks: list[Path], tmp_path: Path
) -> None:
    """No bit of them changes; the weights before them end elsewhere with another weight of the loss."""
    pool.run(frozen_job, tasks[0], mlm, tmp_path, ranks=1, timeout_s=300)
    before = read_tensors(mlm / "checkpoints/step_00000001")
    ends = [
        read_tensors(tmp_path / f"{name}/classification/seed_1/checkpoints/step_00000003") for name in "05"
    ]
    frozen = [name for name in before if ".router." in name or ".experts." in name]
    frozen = [name for name in frozen if name.startswith("model/")]
    assert len(frozen) >= 4
    for name in frozen:
        assert all(torch.equal(end[name], before[name]) for end in ends), name
    first = "model/encoder.layers.0.self_attention.linear_qkv.weight"
    moved = [(end[first] - before[first]).abs().max() for end in ends]
    assert min(moved) > 0 and not torch.equal(ends[0][first], ends[1][first])


def resume_job(task: Path, checkpoint: Path, output: Path) -> list[Any]:
    """Job: a seed, the same and a further one, and other settings in the same folder."""
    select, seeds = "task.select=best", "task.seeds=[1,2]"
    tune([task], checkpoint, output, [select, "task.epochs=2"])
    first = results(output / "classification")
    times = [path.stat().st_mtime_ns for path in sorted((output / "classification/seed_1").rglob("*"))]
    tune([task], checkpoint, output, [select, "task.epochs=2", seeds])
    again = [path.stat().st_mtime_ns for path in sorted((output / "classification/seed_1").rglob("*"))]
    try:
        tune([task], checkpoint, output, [select, "task.epochs=1", seeds])
    except UserError as error:
        problem = str(error)
    (output / "classification/seed_2/scores.json").unlink()
    tune([task], checkpoint, output, [select, "task.epochs=2", seeds])
    last = results(output / "classification")
    tune([task], checkpoint, output, [select, "task.epochs=1"], overwrite=True)
    return [first, times == again, problem, last, results(output / "classification")]


@pytest.mark.full
def test_complete_seeds_stay_and_the_best_epoch_is_taken(
    pool: Pool, mlm: Path, tasks: list[Path], tmp_path: Path
) -> None:
    ((first, same, problem, last, other),) = pool.run(
        resume_job, tasks[0], mlm, tmp_path, ranks=1, timeout_s=300
    )
    assert same and "holds results with task.epochs 2.0, now it is 1.0; name another folder" in problem
    assert list(last["seeds"]) == ["1", "2"] and last["seeds"]["1"] == first["seeds"]["1"]
    found = last["seeds"].values()
    assert all(each["step"] in (3, 6) for each in found)
    accuracies = [each["sets"]["de"]["accuracy"] for each in found]
    assert last["sets"]["de"]["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 2)
    assert list(other["seeds"]) == ["1"] and other["seeds"]["1"]["step"] == 3
