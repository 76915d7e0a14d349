"""The results of a study as plain data: every row's numbers, what the claims come to, and how it was made."""

import datetime
import math
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import megamoe
from megamoe.apps.lab.claims import Values, decide
from megamoe.apps.lab.measures import curves, measured, sizes, unrecorded
from megamoe.apps.lab.plan import Plan
from megamoe.apps.lab.runner import Runner
from megamoe.apps.lab.tasks import Tasks, configuration_digests
from megamoe.apps.lab.tuning import Choice, values_of

LIBRARIES = ("torch", "megatron-core", "deepspeed", "numpy", "scipy")


def results_of(
    plan: Plan, tasks: Tasks, runner: Runner, choices: dict[str, Choice], command: str
) -> dict[str, Any]:
    """Return all results as plain data for JSON.

    rows: of each row its text, the values by measure and seed, their mean and sample standard deviation, the
    paper's numbers, what failed, its parameters and tokens of training, and its tuned value with the runs of
    the tuning that failed. claims: text, place, test, verdict, and each comparison's differences over the
    seeds with mean and interval. curves: step and mean over the seeds, by curve and row. unrecorded: a line
    for each metric that no run has.
    configurations: see `configuration_digests`.
    """
    found, of_runs = measured(plan, tasks, runner), sizes(tasks, runner)
    tuned, untuned = values_of(choices)
    rows = {
        row: {
            "text": plan.study.rows[row].text,
            "published": plan.study.rows[row].published,
            "paper": plan.study.rows[row].paper,
            "measures": {name: _over_seeds(of_rows[row]) for name, of_rows in found.items()},
            "failed": choices[row].problems
            if row in untuned
            else _failed(tasks, runner, row, plan.size.seeds),
            **of_runs.get(row, {}),
            **({"tuned": tuned[row], "tuning_failed": choices[row].problems} if row in tuned else {}),
        }
        for row in plan.configs
    }
    drawn = curves(plan, tasks, runner)
    return {
        "study": plan.name,
        "title": plan.study.title,
        "source": plan.study.source,
        "size": plan.size_name,
        "seeds": plan.size.seeds,
        "rows": rows,
        "claims": decided(plan, found),
        "curves": drawn,
        "unrecorded": unrecorded(plan, tasks, runner, found, drawn),
        "tuning": tuning_of(plan),
        "configurations": configuration_digests(plan, tuned),
        "made": _environment(command),
    }


def decided(plan: Plan, values: Values) -> list[dict[str, Any]]:
    """Return text, place, test, declared amounts, verdict and comparisons of each claim of the plan."""
    claims = []
    for text, claim in plan.claims:
        verdict, findings = decide(
            claim, values, plan.size.seeds, text.margin, plan.size.alpha, plan.study.bounds
        )
        claims.append(
            {**asdict(text), "verdict": verdict, "comparisons": [asdict(finding) for finding in findings]}
        )
    return claims


def stored_values(results: dict[str, Any]) -> Values:
    """Return the values of a results.json by measure, row and seed.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if it is none.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for row, content in results["rows"].items():
        for name, found in content["measures"].items():
            values.setdefault(name, {})[row] = {int(seed): value for seed, value in found["seeds"].items()}
    return values


def tuning_of(plan: Plan) -> dict[str, Any] | None:
    """Return the rule, the measures whose metric the rows are tuned by, and the rows that are trained."""
    rule = plan.size.tuning
    if rule is None:
        return None
    reported = [name for name, measure in plan.study.measures.items() if measure.metric == rule.by]
    return asdict(rule) | {"reported": reported, "rows": plan.study.tuned_rows}


def changed_rows(plan: Plan, results: dict[str, Any]) -> list[str]:
    """Return the rows of results whose configuration is another one in the plan, or that it lacks."""
    tuned = {row: found["tuned"] for row, found in results["rows"].items() if "tuned" in found}
    digests = configuration_digests(plan, tuned)
    return [row for row, known in results["configurations"].items() if digests.get(row) != known]


def _over_seeds(values: dict[int, float]) -> dict[str, Any]:
    known = [*values.values()]
    return {
        "seeds": {str(seed): value for seed, value in values.items()},
        "mean": fmean(known) if known else None,
        "std": stdev(known) if len(known) > 1 and all(map(math.isfinite, known)) else None,
    }


def _failed(tasks: Tasks, runner: Runner, row: str, seeds: list[int]) -> list[str]:
    """Return a line for each task of a row that has failed or was not run."""
    wanted = [tasks.training[row, seed] for seed in seeds]
    wanted += [task for (_, of_row, _), task in tasks.stages.items() if of_row == row]
    lines = [f"{task.name}: {problem}" for task in wanted if (problem := runner.problem_of(task))]
    return list(dict.fromkeys(lines))


def _environment(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "megamoe": megamoe.__version__,
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "processor": _processor(),
    }


def _processor() -> str:
    """Return the processor's name and its cores, from Linux's /proc."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {sum(line.startswith('processor') for line in lines)} cores"
