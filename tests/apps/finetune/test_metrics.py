"""Metrics: the libraries' numbers on given predictions, checked by hand; SQuAD's; mean and spread."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamoe.apps.finetune.label_files import NO_TAG
from megamoe.apps.finetune.results import exact_match, majority, mean_and_spread, scores, token_f1
from megamoe.apps.finetune.task import Task, load_task
from tests.support.apps.tasks import make_task

TRUTH = ["a", "a", "a", "b", "b", "c"]
FOUND = ["a", "b", "a", "b", "a", "d"]
ALL = ["accuracy", "f1_macro", "f1_micro", "f1_weighted", "f1_binary", "matthews"]


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
