"""Metrics beside the libraries' numbers and by hand; files and table of results; foreign folders."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamoe.apps.finetune.examples import Examples
from megamoe.apps.finetune.label_files import NO_TAG
from megamoe.apps.finetune.results import (
    SeedScores,
    exact_match,
    load_scores,
    majority,
    mean_and_spread,
    open_output,
    results,
    save_results,
    save_scores,
    scores,
    table_of,
    token_f1,
)
from megamoe.apps.finetune.task import Task, load_task
from megamoe.errors import UserError
from tests.support.apps.tasks import make_task

ROWS = [{"text": "a", "label": "no"}, {"text": "b", "label": "yes"}, {"text": "c", "label": "yes"}]
EXAMPLES = Examples(["no", "yes"], {"train": ROWS, "test.de": ROWS[:2], "test.en": ROWS})
TRUTH = ["a", "a", "a", "b", "b", "c"]
FOUND = ["a", "b", "a", "b", "a", "d"]
ALL = ["accuracy", "f1_macro", "f1_micro", "f1_weighted", "f1_binary", "matthews"]


def seeds(de: float, en: float) -> SeedScores:
    return SeedScores(7, {"de": {"accuracy": de}, "en": {"accuracy": en}})


def test_the_table_and_the_file_have_means_and_spreads(tmp_path: Path) -> None:
    made = task(tmp_path, "classification", metrics=["accuracy"])
    found = results(made, EXAMPLES, {1: seeds(0.5, 1.0), 5: seeds(0.7, 0.6)}, {"checkpoint": "mlm"})
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
    made = task(tmp_path, "regression", metrics=["pearson"])
    rows = [{"text": "a", "label": 1.0}]
    examples = Examples([], {"train": rows, "test.de": rows})
    undefined = SeedScores(3, {"de": {"pearson": math.nan}})
    save_scores(tmp_path, undefined, {"de": [{"label": 0.5}]})
    assert json.loads((tmp_path / "scores.json").read_text())["sets"] == {"de": {"pearson": None}}
    assert (tmp_path / "predictions/de.jsonl").read_text() == '{"label": 0.5}\n'
    loaded = load_scores(tmp_path, ["de"], ["pearson"])
    assert loaded is not None and math.isnan(loaded.sets["de"]["pearson"])
    both = {1: loaded, 2: SeedScores(3, {"de": {"pearson": 0.5}})}
    found = results(made, examples, both, {"checkpoint": "m"})
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


def task(tmp_path: Path, name: str, **changes: Any) -> Task:
    return load_task(make_task(tmp_path, name, **changes), [])


def labelled(labels: list[str]) -> list[dict[str, Any]]:
    return [{"label": label} for label in labels]


def f1_by_hand(label: str) -> float:
    both = sum(t == f == label for t, f in zip(TRUTH, FOUND, strict=True))
    return 2 * both / (TRUTH.count(label) + FOUND.count(label))


def test_those_of_labels_are_scikit_learns(tmp_path: Path) -> None:
    """Its functions with their defaults, and F1 by hand; `d` is predicted and never true."""
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    made = task(tmp_path, "classification", metrics=ALL, positive="a", labels=["a", "b", "c", "d"])
    found = scores(made, labelled(TRUTH), labelled(FOUND))
    assert found == {
        "accuracy": accuracy_score(TRUTH, FOUND),
        "f1_macro": f1_score(TRUTH, FOUND, average="macro"),
        "f1_micro": f1_score(TRUTH, FOUND, average="micro"),
        "f1_weighted": f1_score(TRUTH, FOUND, average="weighted"),
        "f1_binary": pytest.approx(f1_by_hand("a")),
        "matthews": matthews_corrcoef(TRUTH, FOUND),
    }
    assert found["accuracy"] == 3 / 6
    assert found["f1_macro"] == pytest.approx(sum(map(f1_by_hand, "abcd")) / 4)


def test_correlations_are_those_of_the_definition(tmp_path: Path) -> None:
    made = task(tmp_path, "regression")
    truth, found = [1.0, 2.0, 3.5, 5.0], [1.5, 1.0, 8.0, 9.0]
    result = scores(made, [{"label": each} for each in truth], [{"label": each} for each in found])
    assert result["pearson"] == pytest.approx(np.corrcoef(truth, found)[0, 1])
    assert result["spearman"] == pytest.approx(np.corrcoef([1, 2, 3, 4], [2, 1, 3, 4])[0, 1])
    constant = scores(made, [{"label": each} for each in truth], [{"label": 1.0}] * 4)
    assert all(map(math.isnan, constant.values()))


def test_words_without_a_label_are_wrong(tmp_path: Path) -> None:
    made = task(tmp_path, "tagging")
    rows = [{"tags": ["A", "B", "A"]}, {"tags": ["B"]}]
    found = scores(made, rows, [{"tags": ["A", "B", NO_TAG]}, {"tags": ["B"]}])
    assert found["accuracy"] == 3 / 4
    assert found["f1_macro"] == pytest.approx((2 / 3 + 1) / 2)  # A: one of two found, B: both


# The last three are from the cases of SQuAD's script: an article, punctuation, order of the words.
@pytest.mark.parametrize(
    ("predicted", "answer", "exact", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0),
        ("tower of Eiffel", "Eiffel tower", 0.0, 0.8),
        ("a b b", "b b c", 0.0, 0.8),  # without the article: precision 1, recall 2/3
        ("1066", "in 1066", 0.0, 2 / 3),
        ("none", "1066", 0.0, 0.0),
        ("the", "1066", 0.0, 0.0),
    ],
)
def test_answers_are_scored_as_in_squads_script(predicted: str, answer: str, exact: float, f1: float) -> None:
    assert exact_match(predicted, answer) == exact
    assert token_f1(predicted, answer) == pytest.approx(f1)


def test_the_best_of_several_answers_counts(tmp_path: Path) -> None:
    made = task(tmp_path, "question_answering")
    rows = [{"context": "in the year 1066", "answers": {"text": ["year", "1066"], "answer_start": [7, 12]}}]
    assert scores(made, rows, [{"start": 12, "end": 16}]) == {"exact_match": 1.0, "f1": 1.0}
    assert scores(made, rows, [{"start": 0, "end": 6}]) == {"exact_match": 0.0, "f1": 0.0}


def test_the_commonest_training_label_is_the_baseline(tmp_path: Path) -> None:
    """Of equally common ones the first by name."""
    made = task(tmp_path, "classification", labels=["a", "b", "c"])
    train = labelled(["c", "c", "b", "b", "a"])
    assert majority(made, train, labelled(["b", "b", "a", "c"])) == {
        "accuracy": 0.5,
        "f1_macro": pytest.approx(2 / 3 / 3),
    }
    assert majority(task(tmp_path, "regression"), [], []) == {}


def test_the_spread_is_the_sample_standard_deviation() -> None:
    assert mean_and_spread([0.2, 0.4, 0.9]) == (pytest.approx(0.5), pytest.approx(0.13**0.5))
    assert mean_and_spread([0.3]) == (0.3, None)
    mean, spread = mean_and_spread([0.3, math.nan])
    assert math.isnan(mean) and spread is not None and math.isnan(spread)
