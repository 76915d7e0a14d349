"""Metrics of predictions: scikit-learn's and SciPy's; exact match and token F1 as in SQuAD's script."""

import importlib
import math
import re
import string
from collections import Counter
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

from megamoe.apps.finetune.examples import Row, labels_of
from megamoe.apps.finetune.task import Task
from megamoe.errors import UserError

NO_TAG = ""  # the prediction of a word that was cut off; no label has this name
Scores = dict[str, float]
LIBRARIES = ("sklearn.metrics", "scipy.stats")
ARTICLES = re.compile(r"\b(a|an|the)\b")


def check_libraries() -> None:
    """Raise a UserError with the way to install scikit-learn and SciPy if they are missing."""
    try:
        for library in LIBRARIES:
            importlib.import_module(library)
    except ImportError as error:
        raise UserError(
            f"fine-tuning needs scikit-learn and SciPy ({error}); pip install 'megamoe[finetune]', or in a "
            "clone pip install -e '.[finetune]'"
        ) from None


def scores(task: Task, rows: list[Row], predictions: list[Row]) -> Scores:
    """Return the task's metrics of predictions, by name; NaN where one is not defined.

    rows: the examples. predictions: what `Labelled.prediction` returned of each.
    """
    predicts = task.kind_of_task.predicts
    if predicts == "span":
        pairs = [
            (row["context"][found["start"] : found["end"]], row["answers"]["text"])
            for row, found in zip(rows, predictions, strict=True)
        ]
        all_scores = {"exact_match": exact_match, "f1": token_f1}
        return {
            name: mean(max(all_scores[name](text, answer) for answer in answers) for text, answers in pairs)
            for name in task.metric_names
        }
    if predicts == "number":
        return _correlations(task, [row["label"] for row in rows], [found["label"] for found in predictions])
    return _of_labels(task, labels_of(rows), predicted_labels(rows, predictions))


def predicted_labels(rows: list[Row], predictions: list[Row]) -> list[str]:
    """Return the predicted labels, of words one after the other, with NO_TAG for those that were cut off."""
    found: list[str] = []
    for row, prediction in zip(rows, predictions, strict=True):
        if "tags" in row:
            tags = prediction["tags"]
            found += [*tags, *[NO_TAG] * (len(row["tags"]) - len(tags))]
        else:
            found.append(prediction["label"])
    return found


def majority(task: Task, train: list[Row], rows: list[Row]) -> Scores:
    """Return the metrics of the commonest training label as the prediction of every example.

    Of equally common labels, the first by name. Empty for a task without labels.
    """
    if not task.kind_of_task.has_labels:
        return {}
    counts = Counter(labels_of(train))
    label = min(counts, key=lambda each: (-counts[each], each))
    truth = labels_of(rows)
    return _of_labels(task, truth, [label] * len(truth))


def mean_and_spread(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation; None of a single value. NaN if any value is."""
    if any(map(math.isnan, values)):
        return math.nan, math.nan if len(values) > 1 else None
    return mean(values), stdev(values) if len(values) > 1 else None


def _of_labels(task: Task, truth: list[str], predicted: list[str]) -> Scores:
    """Return scikit-learn's metrics.

    f1_macro is the mean over the labels that occur in the truth or among the predictions, as is its default.
    """
    from sklearn import metrics

    present: Any = sorted({*truth, *predicted} - {NO_TAG})

    def f1(average: str) -> float:
        return float(metrics.f1_score(truth, predicted, labels=present, average=average, zero_division=0.0))

    known: dict[str, Callable[[], float]] = {
        "accuracy": lambda: float(metrics.accuracy_score(truth, predicted)),
        "f1_macro": lambda: f1("macro"),
        "f1_micro": lambda: f1("micro"),
        "f1_weighted": lambda: f1("weighted"),
        "f1_binary": lambda: float(
            metrics.f1_score(
                [label == task.positive for label in truth],
                [label == task.positive for label in predicted],
                zero_division=0.0,
            )
        ),
        "matthews": lambda: float(metrics.matthews_corrcoef(truth, predicted)),
    }
    return {name: known[name]() for name in task.metric_names}


def _correlations(task: Task, truth: list[float], predicted: list[float]) -> Scores:
    """Return SciPy's correlations; NaN of fewer than two examples, or if one side is constant."""
    from scipy import stats

    known = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    if min(len(set(truth)), len(set(predicted))) < 2:
        return dict.fromkeys(task.metric_names, math.nan)
    return {name: float(known[name](truth, predicted).statistic) for name in task.metric_names}


def normalised(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles and double spaces.

    Source: `normalize_answer` of SQuAD's evaluation script (Rajpurkar et al. 2016).
    """
    kept = "".join(char for char in answer.lower() if char not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", kept).split())


def exact_match(predicted: str, answer: str) -> float:
    """Return 1 if the normalised answers are equal, else 0."""
    return float(normalised(predicted) == normalised(answer))


def token_f1(predicted: str, answer: str) -> float:
    """Return the F1 of the words that two normalised answers share, as `f1_score` of SQuAD's script."""
    found, truth = normalised(predicted).split(), normalised(answer).split()
    shared = sum((Counter(found) & Counter(truth)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(found), shared / len(truth)
    return 2 * precision * recall / (precision + recall)
