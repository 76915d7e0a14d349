"""The tuned value of each row: chosen once from the runs that tune it, and kept in tasks/tuned.json.

Later calls take what was chosen. A tuning run that failed is not tried again then: its success could change
the value, with which the row's runs were already trained. While one has neither ended nor failed, nothing is
chosen, and the row's runs wait.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megamoe.apps.lab.measures import last_of, lowest_by
from megamoe.apps.lab.plan import Plan, digest
from megamoe.apps.lab.runner import LARGEST_RECORD, Runner, locked, steps_of
from megamoe.apps.lab.tasks import Task, planned_tasks, tuning_tasks
from megamoe.errors import UserError
from megamoe.io import read_json, reason, replace_file

TUNED = "tuned.json"


@dataclass(frozen=True)
class Choice:
    """What the tuning of a row came to.

    identity: a digest of the rule and of the tuning runs; rows that are tuned together have the same. values:
    those tried; losses: of each, the mean of its runs, None if one failed or is not complete. index: of the
    chosen value; None: no value has a loss, or a run may still go on. problems: a line for each run that
    failed or is not complete.
    """

    identity: str
    values: list[Any]
    losses: list[float | None]
    index: int | None
    problems: list[str]


def tune(plan: Plan, output: Path, runner: Runner, run: bool = True) -> dict[str, Choice]:
    """Return the choice of each row; none if the size has no tuning. run: run what is missing for it.

    Raises:
        UserError: if a record, or the file of the choices, cannot be read or written.
    """
    rule = plan.size.tuning
    if rule is None:
        return {}
    if run:
        runner.run(tuning_to_run(plan, output, runner), after=_steps_after(plan, output, runner))
    found: dict[str, Choice] = {}
    known = _by_identity(_kept(runner.folder))
    for row, tasks in tuning_tasks(plan, output)[1].items():
        identity = _identity(plan, tasks)
        if identity not in known:
            index, losses = lowest_by(rule.by, runner, tasks)
            failed = [it for it in chain(*tasks) if last_of(rule.by, runner, it) is None]
            problems = [
                f"{task.name}: {runner.problem_of(task) or f'no {rule.by} was recorded'}" for task in failed
            ]
            ended = all(runner.has_ended(task) for task in chain(*tasks))
            known[identity] = Choice(identity, rule.values, losses, index if ended else None, problems)
        found[row] = known[identity]
    return _keep(runner.folder, found)


def values_of(choices: dict[str, Choice]) -> tuple[dict[str, Any], list[str]]:
    """Return the chosen value by row, and the rows without one."""
    chosen = {row: it.values[it.index] for row, it in choices.items() if it.index is not None}
    return chosen, [row for row in choices if row not in chosen]


def tuning_to_run(plan: Plan, output: Path, runner: Runner) -> list[Task]:
    """Return the tuning tasks of the rows whose value is not chosen yet.

    A row of a folder without the file of choices counts as chosen if a run of it was started after the
    tuning had ended.
    """
    tasks, of_rows = tuning_tasks(plan, output)
    kept, training = _kept(runner.folder), planned_tasks(plan, output).training
    known = _by_identity(kept)
    wanted = set()
    for row, of_values in of_rows.items():
        of_row = [*chain(*of_values)]
        chosen = _identity(plan, of_values) in known
        if not chosen and row not in kept:
            begun = any(runner.was_started(training[row, seed]) for seed in plan.seeds)
            ended = begun and all(runner.has_ended(task) for task in of_row)
            chosen = ended and any(runner.is_done(task) for task in of_row)
        wanted |= set() if chosen else {task.name for task in of_row}
    return [task for task in tasks.by_name.values() if task.name in wanted]


def _steps_after(plan: Plan, output: Path, runner: Runner) -> int:
    """Return the steps of the study's runs and stages that were not started yet."""
    tasks: Iterable[Task] = planned_tasks(plan, output).by_name.values()
    return sum(steps_of(task) for task in tasks if not runner.was_started(task))


def _identity(plan: Plan, tasks: list[list[Task]]) -> str:
    rule = plan.size.tuning
    assert rule is not None
    return digest(rule.key, rule.values, [rule.by], [task.identity for task in chain(*tasks)])


def _by_identity(choices: dict[str, Choice]) -> dict[str, Choice]:
    return {choice.identity: choice for choice in choices.values()}


def _kept(folder: Path) -> dict[str, Choice]:
    path = folder / TUNED
    if not path.exists():
        return {}
    try:
        found = {row: Choice(**it) for row, it in read_json(path, LARGEST_RECORD).items()}
        values_of(found)
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: {reason(error)}; delete it, and the values are chosen again") from None
    return found


def _keep(folder: Path, found: dict[str, Choice]) -> dict[str, Choice]:
    """Write the choices that the file does not have yet; return them as they are in it.

    Of two processes the first decides. A row without a chosen value is not written: no run rests on it, so
    the next call may try its tuning again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder / "tuned.lock")
    try:
        kept = _kept(folder)
        same = {row for row, it in found.items() if row in kept and kept[row].identity == it.identity}
        new = {row: it for row, it in found.items() if it.index is not None and row not in same}
        if new:
            content = {row: asdict(it) for row, it in (kept | new).items()}
            replace_file(folder / TUNED, json.dumps(content, indent=1).encode(), synced=True)
        return {row: kept[row] if row in same else it for row, it in found.items()}
    finally:
        os.close(lock)
