"""A study at one size: every row's configuration, worked out and checked before a run starts.

A row's configuration is its base, under `set` of the study, of the size and of the row, in this order; then
the size's `scale` multiplies numbers of it, and the overrides of the call come last.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megamoe.apps.lab.claims import Claim
from megamoe.apps.lab.study import (
    OF_LAB,
    ClaimText,
    Row,
    Size,
    Study,
    check_names,
    checked_claims,
    load_study,
)
from megamoe.config.files import merge, plugins_beside, read_run
from megamoe.config.load import apply_override, configure
from megamoe.config.schema import RunConfig
from megamoe.errors import UserError, printable

TASK_PREFIX = "task."  # of overrides that change the fine-tuning


@dataclass(frozen=True)
class Plan:
    """A study at one size, checked: what the lab runs.

    configs: each row's configuration as a tree, without seed and name. all_configs: the same of all rows that
    the size has, those that `--rows` leaves out too. tuning_configs: of the rows that are trained for the
    tuning. task_overrides: `task.key=value` of the user. differences: of each row from its paper.
    """

    name: str
    path: Path
    study: Study
    size_name: str
    size: Size
    configs: dict[str, dict[str, Any]]
    all_configs: dict[str, dict[str, Any]]
    tuning_configs: dict[str, dict[str, Any]]
    claims: list[tuple[ClaimText, Claim]]
    task_overrides: list[str]
    differences: dict[str, list[str]]


def load_plan(
    path: Path, size: str, seeds: int | None, overrides: list[str], rows: list[str] | None = None
) -> Plan:
    """Read a study's YAML and work out every row's configuration at a size.

    seeds: take 1 to this number instead of the size's. rows: take these instead of the size's. overrides:
    `section.key=value` of every run, and `task.key=value` of the fine-tuning.

    Raises:
        UserError: for a file that cannot be read, an unknown key, row, measure or stage, or a claim that
            cannot be read.
    """
    study = load_study(path)
    if size not in study.sizes:
        raise UserError(f"--size: {path} has no size {size}; expected {', '.join(study.sizes)}")
    chosen = study.sizes[size]
    if seeds is not None:
        looks = chosen.looks and [*(count for count in chosen.looks if count < seeds), seeds]
        chosen = replace(chosen, seeds=list(range(1, seeds + 1)), looks=looks)
    try:
        _check_own_keys(study, size, chosen, overrides)
        of_size = _rows(study, chosen)
        if rows is not None:
            chosen = replace(chosen, rows=rows)
        of_call = _rows(study, chosen)
        claims = checked_claims(study, of_call)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    of_task = [each for each in overrides if each.startswith(TASK_PREFIX)]
    of_run = [each for each in overrides if not each.startswith(TASK_PREFIX)]
    if of_task and not any(stage.finetune for stage in study.stages.values()):
        raise UserError(f"{of_task[0]}: the study has no stage `finetune`; leave it out")

    differences: dict[str, list[str]] = {}
    all_configs: dict[str, dict[str, Any]] = {}

    def config_of(name: str) -> dict[str, Any]:
        tree = _config(path.parent, study, chosen, study.rows[name], of_run)
        differences[name] = tree.pop("differences", [])  # which have no effect
        return tree

    for name in {**of_size, **of_call}:
        with nullcontext() if name in of_call else suppress(UserError):  # of a row that is not run
            all_configs[name] = config_of(name)
    _check_scale(path, size, chosen, all_configs)
    configs = {name: all_configs[name] for name in of_call}
    tuned = study.tuned_rows
    tuning_configs = configs if tuned is None else {name: config_of(name) for name in tuned}
    of_rows = configs, all_configs, tuning_configs
    return Plan(path.stem, path, study, size, chosen, *of_rows, claims, of_task, differences)


def at_looks(plan: Plan) -> list[Plan]:
    """Return the plan at each look, with the seeds up to it; without looks the plan itself."""
    counts = plan.size.looks or [len(plan.size.seeds)]
    return [replace(plan, size=replace(plan.size, seeds=plan.size.seeds[:count])) for count in counts]


def _check_own_keys(study: Study, name: str, size: Size, overrides: list[str]) -> None:
    """Refuse what the lab itself gives to each run; a row's base may have it."""
    settings = {"set": study.set, f"sizes.{name}.set": size.set}
    settings |= {f"rows.{each}.set": row.set for each, row in study.rows.items()}
    places = [(f"{where}.{key}", key) for where, keys in settings.items() for key in keys]
    if size.tuning is not None:
        places.append((f"sizes.{name}.tuning.key", size.tuning.key))
        places += [(f"sizes.{name}.tuning.set.{key}", key) for key in size.tuning.set]
    places += [(each, each.partition("=")[0]) for each in overrides]
    for where, key in places:
        if key in OF_LAB:
            raise ValueError(f"{where}: the lab sets {key}: {OF_LAB[key]}; leave it out")


def _rows(study: Study, size: Size) -> dict[str, Row]:
    if size.rows is None:
        return dict(study.rows)
    check_names("rows", size.rows, study.rows)
    return {name: row for name, row in study.rows.items() if name in size.rows}


def _config(folder: Path, study: Study, size: Size, row: Row, overrides: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for base in [row.base] if isinstance(row.base, str) else row.base:
        tree = merge(tree, read_run(folder / base, "STUDY: base"))
    for settings in (study.set, size.set, row.set):
        tree = merge(tree, plugins_beside(folder, settings))
    for key, factor in size.scale.items():
        if is_number(found := _at(tree, key)):
            apply_override(tree, f"{key}={factor * found}")
    for override in overrides:
        apply_override(tree, override)
    return tree


def _at(tree: Any, key: str) -> Any:
    """Return what a tree has at a dotted key; None if it has nothing there."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def is_number(value: Any) -> bool:
    """Whether a value of YAML or JSON is a number, which a truth value is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_scale(path: Path, size: str, chosen: Size, configs: dict[str, dict[str, Any]]) -> None:
    """Refuse a key of `scale` that no row has, or that is no number there.

    A row may lack it: the rows of dense models have no experts.
    """
    for key in chosen.scale:
        found = {row: value for row, tree in configs.items() if (value := _at(tree, key)) is not None}
        where = f"{path}: sizes.{size}.scale"
        for row, value in found.items():
            if not is_number(value):
                raise UserError(f"{where}: {key} of row {row} is {printable(value, 60)}, expected a number")
        if not found:
            raise UserError(f"{where}: no row has a number at {key!r}; leave it out, or correct it")


def digest(*content: Any) -> str:
    """Return a digest of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def configured(plan: Plan, row: str, tree: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the checked configuration of a row's run; `tree` is left as it is.

    Raises:
        UserError: with the study's file and the row, for a configuration that does not fit the schema.
    """
    try:
        return configure(merge(tree, {}), list(overrides))
    except UserError as error:
        raise UserError(f"{plan.path}: row {row}: {str(error).removeprefix('configuration: ')}") from None
