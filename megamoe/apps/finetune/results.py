"""The results of a task: metrics of predictions, their mean and spread over the seeds, a table, files.

The metrics are scikit-learn's and SciPy's; exact match and token F1 are as in SQuAD's script.
"""

import hashlib
import importlib
import json
import math
import re
import shutil
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from megamoe.apps.command import aligned
from megamoe.apps.finetune.examples import TEST, TRAIN, Examples, Row, labels_of
from megamoe.apps.finetune.label_files import ENDING, NO_TAG
from megamoe.apps.finetune.task import VALID, Task
from megamoe.errors import UserError, printable
from megamoe.io import read_json, replace_file

IDENTITY, RESULTS, SCORES, PREDICTIONS = "finetune.json", "results.json", "scores.json", "predictions"
LARGEST = 1 << 26  # bytes of a file of results
MEAN = "mean of the sets"
Scores = dict[str, float]
LIBRARIES = ("sklearn.metrics", "scipy.stats")
ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class SeedScores:
    """What a seed's model scored. step: of its checkpoint. sets: scores by the set's name, `valid` too."""

    step: int
    sets: dict[str, Scores]


def open_output(output: Path, identity: dict[str, Any], overwrite: bool) -> None:
    """Make the folder of the results, or check that it holds results of the same task and checkpoint.

    Raises:
        UserError: if it holds something else, or cannot be written.
    """
    file = output / IDENTITY
    if output.exists() and (output.is_file() or any(output.iterdir())):
        if not file.is_file():
            raise UserError(f"--output: {output} holds no results of this tool; name another folder")
        if overwrite:
            shutil.rmtree(output)
        else:
            _check_same(output, _read(file), identity)
    try:
        output.mkdir(parents=True, exist_ok=True)
        _write(file, identity)
    except OSError as error:
        raise UserError(
            f"--output: {output} cannot be written: {error.strerror}; name another folder"
        ) from None


def digest(examples: Examples) -> str:
    """Return a digest of all examples and labels."""
    text = json.dumps([examples.labels, examples.sets], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_scores(folder: Path, sets: Sequence[str], metrics: Sequence[str]) -> SeedScores | None:
    """Return the scores of these sets by these metrics, or None if a run's seed is not complete.

    folder: the run's.

    Raises:
        UserError: if the file is broken, or lacks one.
    """
    if not (folder / SCORES).is_file():
        return None
    found = _read(folder / SCORES)
    try:
        of_sets: dict[str, Scores] = {name: {} for name in sets}
        for name, of_set in of_sets.items():
            for metric in metrics:
                score = found["sets"][name][metric]
                of_set[metric] = math.nan if score is None else float(score)
        return SeedScores(int(found["step"]), of_sets)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder / SCORES} is broken; delete it, and it is made anew") from None


def save_scores(folder: Path, found: SeedScores, predictions: Mapping[str, list[Row]]) -> None:
    """Write a seed's predictions, a file of JSON lines for each set, and then its scores."""
    (folder / PREDICTIONS).mkdir(exist_ok=True)
    for name, rows in predictions.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        replace_file(folder / PREDICTIONS / f"{name}{ENDING}", text.encode())
    _write(folder / SCORES, {"step": found.step, "sets": _plain(found.sets)})


def results(
    task: Task, examples: Examples, seeds: Mapping[int, SeedScores], about: dict[str, Any]
) -> dict[str, Any]:
    """Return all results as plain data for JSON.

    sets: of each test set, and of `valid`: its number of examples, the mean and the sample standard deviation
    of each metric over the seeds, and the scores of the commonest training label.
    """
    sets: dict[str, Any] = {}
    for name, rows in examples.sets.items():
        if name == TRAIN:
            continue
        shown = name.removeprefix(TEST)
        of_seeds = [found.sets[shown] for found in seeds.values()]
        sets[shown] = {
            "examples": len(rows),
            **_over_seeds(task, of_seeds),
            "majority": majority(task, examples.sets[TRAIN], rows),
        }

    def mean_of_tests(of_sets: Mapping[str, Scores]) -> Scores:
        chosen = [of_sets[name] for name in examples.tests]
        return {metric: sum(each[metric] for each in chosen) / len(chosen) for metric in chosen[0]}

    return {
        **about,
        "task": task.name,
        "kind": task.kind,
        "metrics": task.metric_names,
        "seeds": {str(seed): {"step": found.step, "sets": found.sets} for seed, found in seeds.items()},
        "sets": sets,
        "mean": {
            **_over_seeds(task, [mean_of_tests(found.sets) for found in seeds.values()]),
            "majority": mean_of_tests({name: sets[name]["majority"] for name in examples.tests}),
        },
    }


def save_results(output: Path, found: dict[str, Any]) -> None:
    """Write results.json, in one move."""
    _write(output / RESULTS, _plain(found))


def table_of(found: dict[str, Any]) -> str:
    """Return a row for each set: examples, metrics in percent as mean and standard deviation, baseline."""
    metrics, seeds = found["metrics"], ", ".join(found["seeds"])
    baselines = metrics if found["mean"]["majority"] else []
    rows = [["set", "examples", *metrics, *(f"{metric} of the commonest label" for metric in baselines)]]
    sets = dict(found["sets"])
    if len(sets) - (VALID in sets) > 1:
        sets[MEAN] = found["mean"]
    for name, of_set in sets.items():
        scores = [_shown(of_set[metric]) for metric in metrics]
        scores += [f"{100 * of_set['majority'][metric]:.2f}" for metric in baselines]
        rows.append([name, str(of_set.get("examples", "")), *scores])
    return f"{found['task']}: {found['checkpoint']}, seeds {seeds}, in percent\n{aligned(rows)}"


def _over_seeds(task: Task, of_seeds: list[Scores]) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for metric in task.metric_names:
        mean, spread = mean_and_spread([scores[metric] for scores in of_seeds])
        found[metric] = {"mean": mean, "std": spread}
    return found


def _shown(score: dict[str, float | None]) -> str:
    mean, spread = score["mean"], score["std"]
    if mean is None or math.isnan(mean):
        return "-"
    return f"{100 * mean:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _check_same(output: Path, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Refuse a folder of another task; name the first key that differs."""
    before, after = ({**each, **_dotted(each.get("task"))} for each in (saved, identity))
    for key, value in after.items():
        if key != "task" and before.get(key) != value:
            raise UserError(
                f"--output: {output} holds results with {key} {printable(before.get(key), 60)}, now it is "
                f"{printable(value, 60)}; name another folder, or add --overwrite"
            )


def _dotted(task: Any) -> dict[str, Any]:
    return {f"task.{key}": value for key, value in task.items()} if isinstance(task, dict) else {}


def _plain(value: Any) -> Any:
    """Return the value with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, LARGEST)
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is broken: no JSON object; delete it, and it is made anew")
    return found


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


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
    return _of_labels(task, labels_of(rows), labels_of(predictions))


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
        if average == "binary":
            sides = [[label == task.positive for label in side] for side in (truth, predicted)]
            return metrics.f1_score(*sides, zero_division=0.0)
        return metrics.f1_score(truth, predicted, labels=present, average=average, zero_division=0.0)

    others = {"accuracy": metrics.accuracy_score, "matthews": metrics.matthews_corrcoef}
    return {
        name: float(others[name](truth, predicted) if name in others else f1(name.removeprefix("f1_")))
        for name in task.metric_names
    }


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
