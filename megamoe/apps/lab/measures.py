"""The numbers of a study's rows and seeds, read from what its tasks have written."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megamoe.apps.lab.plan import Plan, is_number
from megamoe.apps.lab.runner import Runner
from megamoe.apps.lab.study import Curve, Measure
from megamoe.apps.lab.tasks import RESULT, Task, Tasks
from megamoe.apps.report.run_statistics import Rows, Run, moe_layers, read_run, series
from megamoe.errors import UserError
from megamoe.io import read_json, reason
from megamoe.metrics import names
from megamoe.metrics.formats import NON_FINITE
from megamoe.metrics.recorder import METRICS_FILE
from megamoe.registry import nearest

LARGEST_RESULT = 1 << 28  # bytes
INDEX, SLICE = re.compile(r"-?\d{1,9}"), re.compile(r"(\d{1,9}):(\d{1,9})")  # of a list in a path
SPIKE_WINDOW, SPIKE_DEVIATIONS = 20, 6.0
SMOOTHED = 10  # values of a curve
Found = dict[str, dict[str, dict[int, float]]]  # by measure, row and seed
Points = Sequence[tuple[int, float]]  # step and value
Curves = dict[str, dict[str, Points]]  # by curve and row


def measured(plan: Plan, tasks: Tasks, runner: Runner) -> Found:
    """Return every measure of every row and seed whose tasks are complete.

    Raises:
        UserError: if a record or result cannot be read, or has no number where the study says.
    """
    found: Found = {name: {row: {} for row in plan.configs} for name in plan.study.measures}
    read: dict[Path, Any] = {}
    for (row, seed), training in tasks.training.items():
        if not runner.is_done(training):
            continue
        run = read.setdefault(training.folder, None) or read_run(training.folder)
        read[training.folder], record = run, runner.record(training)
        for name, measure in plan.study.measures.items():
            value = None
            if measure.stage is not None:
                value = _of_stage(plan, tasks, runner, name, row, seed)
            elif measure.until is not None:
                value = _steps_until(measure, run, runner, tasks.training.get((measure.until, seed)))
            else:
                value = FACTS[measure.fact](run, record) if measure.fact else _taken(measure, run)
            if value is not None:
                value = perplexity(value) if measure.exponential else value
                found[name][row][seed] = value * measure.scale
    return found


def unrecorded(plan: Plan, tasks: Tasks, runner: Runner, found: Found, drawn: Curves) -> list[str]:
    """Return a line for each measure and curve by a metric of which no complete run has a number.

    found, drawn: see `measured` and `curves`. Empty while no run is complete.
    """
    done = [*filter(runner.is_done, [*tasks.training.values(), *tasks.stages.values()])]
    runs = [read_run(folder) for folder in {task.folder for task in done if task.configuration is not None}]
    runs += [run for task in done for run in _tuned(task)]
    known = sorted({key for run in runs for row in run.rows for key in row})
    without = [name for name, of_rows in found.items() if not any(of_rows.values())]
    asked = [(f"measure {name}", plan.study.measures[name].metric) for name in without]
    asked += [(f"curve {name}", it.metric) for name, it in plan.study.curves.items() if not drawn[name]]
    return [
        f"{named}: no run has the metric {metric!r}{nearest(metric, known)}"
        for named, metric in asked
        if metric is not None and known
    ]


def perplexity(loss: float) -> float:
    """Return exp(loss): nan of nan, and infinity where it is too large for a float."""
    return math.inf if loss > 709 else math.exp(loss)


def _of_stage(plan: Plan, tasks: Tasks, runner: Runner, name: str, row: str, seed: int) -> float | None:
    """Return a measure of a stage; None if no stage of it is complete with this row."""
    measure = plan.study.measures[name]
    for stage in measure.stages:
        task = tasks.stages.get((stage, row, seed))
        if task is None or not runner.is_done(task):
            continue
        if measure.path is not None:
            result = _json(task.folder / RESULT[plan.study.stages[stage].kind])
            return _at(result, measure, f"measures.{name}")
        runs = _tuned(task)
        if measure.consistency is not None:
            windows = consistency([run.rows for run in runs], measure.consistency)
            return windows[0 if measure.take == "first" else -1][1] if windows else None
        values = [value for run in runs if (value := _taken(measure, run)) is not None]
        return statistics.fmean(values) if values else None
    return None


def curves(plan: Plan, tasks: Tasks, runner: Runner) -> Curves:
    """Return the curves of the study: at each step the mean over the complete runs that recorded it."""
    found: Curves = {name: {} for name in plan.study.curves}
    for name, curve in plan.study.curves.items():
        for row in plan.configs:
            at: dict[int, list[float]] = {}
            for seed in plan.size.seeds:
                for step, value in _points(curve, tasks, runner, row, seed):
                    at.setdefault(step, []).append(value)
            if at:
                found[name][row] = [(step, statistics.fmean(values)) for step, values in sorted(at.items())]
    return found


def crossing(points: Points, others: Points) -> int | None:
    """Return the first step from which a curve stays below another one; None if it does not at the end.

    Their difference at the steps of both is smoothed: by the mean of its last 10 values.
    """
    known = dict(others)
    differences = [(step, value - known[step]) for step, value in points if step in known]
    found = None
    for index, (step, _) in enumerate(differences):
        latest = differences[max(0, index + 1 - SMOOTHED) : index + 1]
        is_below = statistics.fmean(difference for _, difference in latest) < 0
        found = (step if found is None else found) if is_below else None
    return found


def tokens_at(results: dict[str, Any], row: str, points: Points, step: int) -> int:
    """Return how many tokens a row's run has seen at a step of its curve, whose last step ends the run."""
    return round(results["rows"][row]["tokens"] * step / points[-1][0])


def _points(curve: Curve, tasks: Tasks, runner: Runner, row: str, seed: int) -> Points:
    """Return step and value of a curve's points of one row and seed; none if its task is not complete."""
    of_stage = tasks.stages.get((curve.stage or "", row, seed))
    task = tasks.training.get((row, seed)) if curve.stage is None else of_stage
    if task is None or not runner.is_done(task):
        return []
    if curve.consistency is not None:
        return consistency([run.rows for run in _tuned(task)], curve.consistency)
    assert curve.metric is not None
    steps, values = series(read_run(task.folder).rows, curve.metric)
    return [(step, float(value)) for step, value in zip(steps, values, strict=True)]


def _tuned(task: Task) -> list[Run]:
    """Return the runs of a stage that fine-tunes, one for each seed."""
    return [read_run(path.parent) for path in sorted(task.folder.glob(f"seed_*/{METRICS_FILE}"))]


def consistency(runs: Sequence[Rows], window: int) -> list[tuple[int, float]]:
    """Return IC = sum over i, j of rho(l_i, l_j) / m^2 for each window of steps, with its last step.

    runs: the records of m runs. l_i: the pairs that each expert computed in run i, over the window's logged
    steps; rho: Pearson's correlation. The mean over MoE layers, without those where a run gave all experts
    the same load. A last window with fewer steps is left out, unless it is the only one. Empty: fewer than
    two runs, or none with MoE layers.

    Source: Chi et al. 2022 (X-MoE), section 4.5 and figure 3b: fine-tunings of one model that differ in seed.
    """
    keys = [names.of_layer(layer)[names.LOAD] for layer in (moe_layers(runs[0]) if runs else [])]
    logged = [[row for row in rows if all(key in row for key in keys)] for rows in runs]
    steps = min(map(len, logged), default=0)
    window = min(window, steps)
    found = []
    for end in range(window, steps + 1 if window and len(runs) > 1 else 0, window or 1):
        of_layers = []
        for key in keys:
            load_RE = np.array([np.sum([row[key] for row in rows[end - window : end]], 0) for rows in logged])
            if load_RE.std(axis=1).all():
                of_layers.append(float(np.corrcoef(load_RE).mean()))
        if of_layers:
            found.append((int(logged[0][end - 1][names.STEP]), statistics.fmean(of_layers)))
    return found


def lowest_by(
    key: str, runner: Runner, tasks: Sequence[Sequence[Task]]
) -> tuple[int | None, list[float | None]]:
    """Return for which value the runs ended with the lowest metric, and every value's (None: a run failed).

    key: of the metric. tasks: the runs of each value, whose mean counts. If no value has all of its runs,
    none is the lowest.
    """
    found: list[float | None] = []
    for of_value in tasks:
        ended = [last_of(key, runner, task) for task in of_value]
        losses = [loss for loss in ended if loss is not None]
        found.append(statistics.fmean(losses) if len(losses) == len(ended) else None)
    known = [(loss, number) for number, loss in enumerate(found) if loss is not None]
    return (min(known)[1] if known else None), found


def last_of(key: str, runner: Runner, task: Task) -> float | None:
    """Return the last value of a metric that a run has recorded; None if it failed."""
    _, recorded = series(read_run(task.folder).rows if runner.is_done(task) else [], key)
    return recorded[-1] if recorded and math.isfinite(recorded[-1]) else None


def sizes(tasks: Tasks, runner: Runner) -> dict[str, dict[str, int]]:
    """Return the `parameters` of each row, and the `tokens` of training: of its first complete run."""
    found: dict[str, dict[str, int]] = {}
    for (row, _), task in tasks.training.items():
        if row not in found and runner.is_done(task):
            run = read_run(task.folder)
            known = {"parameters": run.summary.get("parameters_total"), "tokens": run.statistics.tokens}
            found[row] = {name: it for name, it in known.items() if isinstance(it, int)}
    return found


def _taken(measure: Measure, run: Run) -> float | None:
    assert measure.metric is not None
    recorded = [float(value) for value in series(run.rows, measure.metric)[1] if is_number(value)]
    return TAKES[measure.take or "last"](recorded) if recorded else None


def _steps_until(measure: Measure, run: Run, runner: Runner, goal: Task | None) -> float | None:
    """Return the first recorded step at which the run's metric is at or below the last one of the goal's run.

    The run's last recorded step if it never is. None: the goal's run is not complete, or its end not finite.
    """
    assert measure.metric is not None
    lowest = None if goal is None else last_of(measure.metric, runner, goal)
    steps, values = series(run.rows, measure.metric)
    if lowest is None or not steps:
        return None
    return float(
        next((step for step, value in zip(steps, values, strict=True) if value <= lowest), steps[-1])
    )


def spikes(values: Sequence[float]) -> int:
    """Return how many values are not finite, or lie more than 6 standard deviations above the mean of the 20
    values before them. The definition is ours.
    """
    count = 0
    for at in range(SPIKE_WINDOW, len(values)):
        before = [value for value in values[at - SPIKE_WINDOW : at] if math.isfinite(value)]
        if not math.isfinite(values[at]):
            count += 1
        elif len(before) > 1:
            limit = statistics.fmean(before) + SPIKE_DEVIATIONS * statistics.stdev(before)
            count += values[at] > limit
    return count


def flops_per_token(run: Run) -> float | None:
    """Return the FLOPs of a training step's forward and backward pass by the tokens of the step, 2 for a
    multiply-add: the mean of `perf/gflops_per_token` over the logged steps.
    """
    logged = series(run.rows, names.GFLOPS_PER_TOKEN)[1]
    return 1e9 * statistics.fmean(logged) if logged else None


def _training_flops(run: Run) -> float | None:
    of_token, tokens = flops_per_token(run), run.statistics.tokens
    return None if of_token is None or tokens is None else of_token * tokens


TAKES: dict[str, Callable[[Sequence[float]], float]] = {  # of the values of a run, or those at a path
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "lowest": min,
    "highest": max,
    "mean": statistics.fmean,
    "rise": lambda values: values[-1] - min(values),
    "spikes": lambda values: float(spikes(values)),
}
FACTS = {
    "flops_per_token": lambda run, record: flops_per_token(run),
    "training_flops": lambda run, record: _training_flops(run),
    "memory": lambda run, record: float(record.memory) or None,
    "parameters": lambda run, record: run.summary.get("parameters_total"),
    "active_parameters": lambda run, record: run.summary.get("parameters_active"),
}


def _json(path: Path) -> Any:
    try:
        return read_json(path, LARGEST_RESULT)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: {reason(error)}; delete the task's record beside it, and run again"
        ) from None


def _at(content: Any, measure: Measure, where: str) -> float | None:
    """Return the number at the measure's path; None if it is null, or if nothing is there."""
    assert measure.path is not None
    found = [content]
    for step in measure.path.split("/"):
        below: list[Any] = []
        for each in found:
            if step == "*":
                items = each.items() if isinstance(each, dict) else enumerate(each)
                below += [value for key, value in items if str(key) not in measure.without]
            elif isinstance(each, dict) and step in each:
                below.append(each[step])
            elif isinstance(each, list) and INDEX.fullmatch(step) and -len(each) <= int(step) < len(each):
                below.append(each[int(step)])
            elif isinstance(each, list) and (ends := SLICE.fullmatch(step)):
                below += each[int(ends[1]) : int(ends[2])]
            else:
                known = ", ".join(map(str, each)) if isinstance(each, dict) else f"{len(each)} entries"
                raise UserError(f"{where}: path: nothing at {step!r}; expected one of {known[:200]}")
        found = below
    found = [NON_FINITE.get(each, each) if isinstance(each, str) else each for each in found]
    numbers = [float(each) for each in found if is_number(each)]
    return TAKES[measure.take or "mean"](numbers) if numbers else None
