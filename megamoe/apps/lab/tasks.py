"""The tasks of a study: a training run for each row and seed, and what is done with the trained models.

Rows with the same configuration share their runs. The folder of a study has

    configurations/  the YAML of each run                 runs/    the runs' folders
    stages/          what each stage wrote, by run        tasks/   a record and the output of each task
    page/            the results, see `page.py`
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe.apps.lab.study import Plan, Stage, digest
from megamoe.config.files import merge
from megamoe.config.load import apply_override, configure
from megamoe.config.yaml_text import dump
from megamoe.errors import UserError

COMMANDS = ("-m", "megamoe.cli")
RESULT = {  # of a stage, in its folder
    "finetune": "results.json",
    "translate": "scores.json",
    "analyze": "routing.json",
    "evaluate": "rows.json",
}
DEFAULTS = {"log": {"report": False}}  # the study has a page of its own


@dataclass(frozen=True)
class Task:
    """One process.

    folder: the run's, or the stage's. arguments: of `python`. identity: a digest of all that decides the
    result. needs: names of tasks that must be complete. checkpoints_of: a run all of whose checkpoints are
    further arguments. configuration: the YAML that it reads, as file and text. steps: of a training run.
    """

    name: str
    folder: Path
    arguments: tuple[str, ...]
    identity: str
    needs: tuple[str, ...] = ()
    checkpoints_of: Path | None = None
    configuration: tuple[Path, str] | None = None
    steps: int = 0


@dataclass
class Tasks:
    """The tasks by name. training: the task of each row and seed; stages: of each stage, row and seed."""

    by_name: dict[str, Task] = field(default_factory=dict)
    training: dict[tuple[str, int], Task] = field(default_factory=dict)
    stages: dict[tuple[str, str, int], Task] = field(default_factory=dict)

    def add(self, task: Task) -> Task:
        """Add a task; return the one of the same identity, if there is one already."""
        same = next((it for it in self.by_name.values() if it.identity == task.identity), task)
        return self.by_name.setdefault(same.name, same)

    def chains(self) -> list[list[Task]]:
        """Return each training run with the stages that need only it, in order: the work of one job."""
        chains = {task.name: [task] for task in self.by_name.values() if not task.needs}
        for task in self.by_name.values():
            if len(task.needs) == 1:
                chains[task.needs[0]].append(task)
        return [*chains.values()]


def tuning_tasks(plan: Plan, output: Path) -> tuple[Tasks, dict[str, list[Task]]]:
    """Return the tasks that tune the rows, and each row's tasks in the order of the values."""
    tuning = plan.size.tuning
    tasks = Tasks()
    if tuning is None:
        return tasks, {}
    of_rows: dict[str, list[Task]] = {}
    for row, config in plan.configs.items():
        for number, value in enumerate(tuning.values):
            tree = merge(config, tuning.set)
            apply_override(tree, f"{tuning.key}={json.dumps(value)}")
            task = tasks.add(_training(plan, output, row, f"tuning-{row}-{number}", tree, tuning.seed))
            of_rows.setdefault(row, []).append(task)
    return tasks, of_rows


def study_tasks(plan: Plan, output: Path, tuned: dict[str, Any]) -> Tasks:
    """Return the tasks of all rows and seeds. tuned: the value of the tuned key by row."""
    tasks, tuning = Tasks(), plan.size.tuning
    for row, config in plan.configs.items():
        tree = merge(config, {})
        if tuning is not None and row in tuned:
            apply_override(tree, f"{tuning.key}={json.dumps(tuned[row])}")
        for seed in plan.seeds:
            tasks.training[row, seed] = tasks.add(_training(plan, output, row, f"{row}-{seed}", tree, seed))
    for name, stage in plan.study.stages.items():
        for row in plan.configs if stage.rows is None else [row for row in stage.rows if row in plan.configs]:
            over_seeds = stage.analyze is not None and stage.analyze.of == "seeds"
            for seed in plan.seeds[:1] if over_seeds else plan.seeds:
                runs = [tasks.training[row, it] for it in (plan.seeds if over_seeds else [seed])]
                tasks.stages[name, row, seed] = tasks.add(
                    _of_stage(plan, output, (name, stage), row, runs, seed)
                )
    return tasks


def _training(plan: Plan, output: Path, row: str, name: str, tree: dict[str, Any], seed: int) -> Task:
    """Return the task of a run, after a check of its configuration."""
    runs = output / "runs"
    tree = merge(DEFAULTS, tree)
    identity = digest("train", tree, seed, plan.size.ranks)
    tree = merge(tree, {"name": name, "output": str(runs), "seed": seed})
    try:
        config = configure(merge(tree, {}), [])
    except UserError as error:
        raise UserError(f"{plan.path}: row {row}: {str(error).removeprefix('configuration: ')}") from None
    path = output / "configurations" / f"{name}.yaml"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.size.ranks))
    arguments = (*(launcher if plan.size.ranks > 1 else ()), "-m", "megamoe", "--config", str(path))
    return Task(
        name,
        runs / name,
        (*arguments, "checkpoint.resume=auto"),
        identity,
        configuration=(path, dump(tree)),
        steps=config.train.steps or 0,
    )


def _of_stage(
    plan: Plan, output: Path, named: tuple[str, Stage], row: str, runs: list[Task], seed: int
) -> Task:
    name, stage = named
    folder = output / "stages" / name / f"{row}-{seed}"
    result = folder / RESULT[stage.kind]
    paths = [str(run.folder) for run in runs]
    checkpoints_of = None
    if stage.finetune is not None:
        settings = merge(merge(stage.finetune.set, plan.size.finetune), plan.study.rows[row].finetune)
        settings = settings | {"seeds": settings.get("seeds", [seed])}
        given = [f"task.{key}={json.dumps(value)}" for key, value in settings.items()]
        task_file = plan.path.parent / stage.finetune.task
        arguments = ["finetune", "--task", str(task_file), "--checkpoint", *paths, "--output", str(folder)]
        arguments += [*given, *plan.task_overrides]
    elif stage.translate is not None:
        chosen = stage.translate
        arguments = ["translate", *paths, "--from", chosen.source, "--to", chosen.target, "--score"]
        arguments += ["--beams", str(chosen.beams), "--json", str(result)]
        arguments += _samples(plan, chosen.samples)
    elif stage.analyze is not None:
        analyses = stage.analyze
        checkpoints_of = runs[0].folder if analyses.of == "all" else None
        arguments = ["analyze", "--analyses", ",".join(analyses.analyses), "--output", str(folder)]
        arguments += _samples(plan, analyses.samples)
        arguments += [] if checkpoints_of is not None else paths
    else:
        assert stage.evaluate is not None
        sweeps = [
            f"{key}={','.join(map(json.dumps, values))}" for key, values in stage.evaluate.sweep.items()
        ]
        arguments = ["evaluate", *paths, "--json", str(result)]
        arguments += [each for sweep in sweeps for each in ("--sweep", sweep)]
        arguments += _samples(plan, stage.evaluate.samples)
    # Not the folders: rows that share their runs share what is done with them.
    decides = [each for each in arguments if not each.startswith(str(output))]
    identity = digest(decides, [run.identity for run in runs])
    needs = tuple(run.name for run in runs)
    return Task(f"{name}-{row}-{seed}", folder, (*COMMANDS, *arguments), identity, needs, checkpoints_of)


def _samples(plan: Plan, of_stage: int | None) -> list[str]:
    samples = plan.size.samples or of_stage
    return [] if samples is None else ["--samples", str(samples)]
