"""The results of a study as plain data: every row's numbers, what the claims come to, and how it was made."""

import datetime
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import megamoe
from megamoe.apps.lab.claims import decide
from megamoe.apps.lab.measures import curves, measured
from megamoe.apps.lab.runner import DONE, Runner
from megamoe.apps.lab.study import Plan
from megamoe.apps.lab.tasks import Tasks

LIBRARIES = ("torch", "megatron-core", "deepspeed", "numpy", "scipy")


def results_of(
    plan: Plan, tasks: Tasks, runner: Runner, tuned: dict[str, Any], command: str
) -> dict[str, Any]:
    """Return all results as plain data for JSON.

    rows: of each row its text, the values by measure and seed, their mean and sample standard deviation, the
    paper's numbers, and what failed. claims: text, place, test, verdict, and each comparison's differences
    over the seeds with mean and 95 % interval. curves: step and mean over the seeds, by curve and row.
    """
    found = measured(plan, tasks, runner)
    rows = {
        row: {
            "text": plan.study.rows[row].text,
            "published": plan.study.rows[row].published,
            "paper": plan.study.rows[row].paper,
            "measures": {name: _over_seeds(of_rows[row]) for name, of_rows in found.items()},
            "failed": _failed(tasks, runner, row, plan.seeds),
            **({"tuned": tuned[row]} if row in tuned else {}),
        }
        for row in plan.configs
    }
    claims = []
    for text, claim in plan.claims:
        verdict, findings = decide(claim, found)
        told = {"text": text.text, "place": text.place, "test": text.test, "verdict": verdict}
        claims.append({**told, "comparisons": [asdict(finding) for finding in findings]})
    return {
        "study": plan.name,
        "title": plan.study.title,
        "source": plan.study.source,
        "size": plan.size_name,
        "seeds": plan.seeds,
        "rows": rows,
        "claims": claims,
        "curves": curves(plan, tasks, runner),
        "tuning": None
        if plan.size.tuning is None
        else asdict(plan.size.tuning) | {"reported": tuned_by(plan)},
        "made": _environment(command),
    }


def tuned_by(plan: Plan) -> list[str]:
    """Return the measures whose metric is one that the rows are tuned by."""
    by = plan.size.tuning.metrics if plan.size.tuning else []
    return [name for name, measure in plan.study.measures.items() if measure.metric in by]


def _over_seeds(values: dict[int, float]) -> dict[str, Any]:
    known = [*values.values()]
    return {
        "seeds": {str(seed): value for seed, value in values.items()},
        "mean": fmean(known) if known else None,
        "std": stdev(known) if len(known) > 1 else None,
    }


def _failed(tasks: Tasks, runner: Runner, row: str, seeds: list[int]) -> list[str]:
    """Return a line for each task of a row that has failed or was not run."""
    wanted = [tasks.training[row, seed] for seed in seeds]
    wanted += [task for (_, of_row, _), task in tasks.stages.items() if of_row == row]
    lines = []
    for task in wanted:
        record = runner.record(task)
        if record is None or record.state != DONE:
            problem = record.problem if record is not None else ""
            lines.append(f"{task.name}: {problem or 'not complete'}")
    return list(dict.fromkeys(lines))


def _environment(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "megamoe": megamoe.__version__,
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := _version(name)) is not None},
        "processor": _processor(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name, from Linux's /proc where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = sum(line.startswith("processor") for line in lines)
    return f"{found or platform.machine()}, {cores} cores"
