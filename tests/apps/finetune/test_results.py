"""Files and table of results: mean and spread over seeds, scores that are not defined, foreign folders."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.finetune.examples import Examples
from megamoe.apps.finetune.results import (
    SeedScores,
    load_scores,
    open_output,
    results,
    save_results,
    save_scores,
    table_of,
)
from megamoe.apps.finetune.task import load_task
from megamoe.errors import UserError
from tests.support.apps.tasks import make_task

ROWS = [{"text": "a", "label": "no"}, {"text": "b", "label": "yes"}, {"text": "c", "label": "yes"}]
EXAMPLES = Examples(["no", "yes"], {"train": ROWS, "test.de": ROWS[:2], "test.en": ROWS})


def seeds(de: float, en: float) -> SeedScores:
    return SeedScores(7, {"de": {"accuracy": de}, "en": {"accuracy": en}})


def test_the_table_and_the_file_have_means_and_spreads(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path, "classification", metrics=["accuracy"]), [])
    found = results(task, EXAMPLES, {1: seeds(0.5, 1.0), 5: seeds(0.7, 0.6)}, {"checkpoint": "mlm"})
    assert found["sets"]["de"] == {
        "examples": 2,
        "accuracy": {"mean": pytest.approx(0.6), "std": pytest.approx(0.02**0.5)},
        "majority": {"accuracy": 0.5},
    }
    assert found["mean"]["accuracy"] == {"mean": pytest.approx(0.7), "std": pytest.approx(0.005**0.5)}
    assert found["mean"]["majority"] == {"accuracy": pytest.approx((1 / 2 + 2 / 3) / 2)}
    save_results(tmp_path, found)
    assert json.loads((tmp_path / "results.json").read_text())["seeds"]["5"]["sets"]["en"]["accuracy"] == 0.6
    lines = [line.split() for line in table_of(found).splitlines()]
    assert ["de", "2", "60.00", "±", "14.14", "50.00"] in lines
    assert ["mean", "of", "the", "sets", "70.00", "±", "7.07", "58.33"] in lines


def test_scores_that_are_not_defined_are_null_in_files_and_a_dash_in_the_table(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path, "regression", metrics=["pearson"]), [])
    rows = [{"text": "a", "label": 1.0}]
    examples = Examples([], {"train": rows, "test.de": rows})
    scores = SeedScores(3, {"de": {"pearson": math.nan}})
    save_scores(tmp_path, scores, {"de": [{"label": 0.5}]})
    assert json.loads((tmp_path / "scores.json").read_text())["sets"] == {"de": {"pearson": None}}
    assert (tmp_path / "predictions/de.jsonl").read_text() == '{"label": 0.5}\n'
    loaded = load_scores(tmp_path, ["de"], ["pearson"])
    assert loaded is not None and math.isnan(loaded.sets["de"]["pearson"])
    found = results(
        task, examples, {1: loaded, 2: SeedScores(3, {"de": {"pearson": 0.5}})}, {"checkpoint": "m"}
    )
    save_results(tmp_path, found)
    saved: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert saved["sets"]["de"]["pearson"] == {"mean": None, "std": None}
    assert ["de", "1", "-"] in [line.split() for line in table_of(found).splitlines()]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    identity = {"task": {"epochs": 1, "name": "a"}, "examples": "x", "overrides": []}
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="other holds no results of this tool; name another folder"):
            open_output(other, identity, overwrite)
    assert (other / "notes.txt").read_text() == "mine"
    output = tmp_path / "new/deep"
    open_output(output, identity, False)
    open_output(output, identity, False)
    with pytest.raises(UserError, match="holds results with task.epochs 1, now it is 2; .* --overwrite"):
        open_output(output, {**identity, "task": {"epochs": 2, "name": "a"}}, False)
    with pytest.raises(UserError, match="holds results with examples x, now it is y"):
        open_output(output, {**identity, "examples": "y"}, False)
    (output / "seed_1").mkdir()
    open_output(output, {**identity, "examples": "y"}, True)
    assert not (output / "seed_1").exists()
    (output / "seed_1").mkdir()
    for broken in ('{"de": {}}', '{"de": {"accuracy": "high"}}', '{"de": 1}', '{"en": {"accuracy": 1}}'):
        (output / "seed_1/scores.json").write_text(f'{{"step": 1, "sets": {broken}}}')
        with pytest.raises(UserError, match="scores.json is broken; delete it"):
            load_scores(output / "seed_1", ["de"], ["accuracy"])
    assert load_scores(output, ["de"], ["accuracy"]) is None
    (output / "file").touch()
    with pytest.raises(UserError, match="--output: .*file/new cannot be written: Not a directory; name"):
        open_output(output / "file/new", identity, False)
