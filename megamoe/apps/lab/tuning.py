"""The tuned value of each row: chosen once from the runs that tune it, and kept in tasks/tuned.json.

Later calls take what was chosen. A tuning run that failed is not tried again then: its success could change
the value, with which the row's runs were already trained. While one has neither ended nor failed, nothing is
chosen, and the row's runs wait.
"""

import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megamoe.apps.lab.measures import last_of, lowest_by
from megamoe.apps.lab.plan import Plan, digest
from megamoe.apps.lab.runner import DONE, FAILED, LARGEST_RECORD, Runner
from megamoe.apps.lab.study import Tuning
from megamoe.apps.lab.tasks import Task, tuning_tasks
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


def tune(plan: Plan, output: Path, runner: Runner) -> dict[str, Choice]:
    """Run what is missing for the tuning, and return the choice of each row; none if the size has no tuning.

    A row without a chosen value is not kept: no run rests on it, so the next call may try its tuning again.

    Raises:
        UserError: if a record, or the file of the choices, cannot be read or written.
    """
    rule = plan.size.tuning
    if rule is None:
        return {}
    path = runner.folder / TUNED
    kept = _kept(path)
    known = {choice.identity: choice for choice in kept.values()}
    tasks, of_rows = tuning_tasks(plan, output)
    identities = {
        row: digest(rule.key, rule.values, [rule.by], [task.identity for task in chain(*of_values)])
        for row, of_values in of_rows.items()
    }
    open_rows = [of_values for row, of_values in of_rows.items() if identities[row] not in known]
    wanted = {task.name for of_values in open_rows for task in chain(*of_values)}
    runner.run(task for task in tasks.by_name.values() if task.name in wanted)
    found: dict[str, Choice] = {}
    for row, identity in identities.items():
        if identity not in known:
            known[identity] = _chosen(rule, identity, runner, of_rows[row])
        found[row] = known[identity]
    new = {row: it for row, it in found.items() if it.index is not None and kept.get(row) != it}
    if new:
        content = {row: asdict(it) for row, it in (kept | new).items()}
        replace_file(path, json.dumps(content, indent=1).encode(), synced=True)
    return found


def _chosen(rule: Tuning, identity: str, runner: Runner, tasks: list[list[Task]]) -> Choice:
    """Return what the runs of each value say; no value is chosen while one of them may go on."""
    index, losses = lowest_by(rule.by, runner, tasks)
    problems = [
        f"{task.name}: {runner.problem_of(task) or f'no {rule.by} was recorded'}"
        for task in chain(*tasks)
        if last_of(rule.by, runner, task) is None
    ]
    # One that was interrupted or stopped goes on.
    ended = all(runner.record(task).state in (DONE, FAILED) for task in chain(*tasks))
    return Choice(identity, rule.values, losses, index if ended else None, problems)


def values_of(choices: dict[str, Choice]) -> tuple[dict[str, Any], list[str]]:
    """Return the chosen value by row, and the rows without one."""
    chosen = {row: it.values[it.index] for row, it in choices.items() if it.index is not None}
    return chosen, [row for row in choices if row not in chosen]


def _kept(path: Path) -> dict[str, Choice]:
    if not path.exists():
        return {}
    try:
        found = {row: Choice(**it) for row, it in read_json(path, LARGEST_RECORD).items()}
        values_of(found)
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: {reason(error)}; delete it, and the values are chosen again") from None
    return found
