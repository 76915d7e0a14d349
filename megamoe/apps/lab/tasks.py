"""The tasks of a study: a training run for each row and seed, and what is done with the trained models.

Rows with the same configuration share their runs, which have the name of the first of these rows. The folder
of a study has

    configurations/  the YAML of each run                 runs/    the runs' folders
    stages/          what each stage wrote, by run        tasks/   a record and the output of each task
    page/            the results, see `page.py`
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe import registry
from megamoe.apps.finetune.task import load_task
from megamoe.apps.lab.plan import Plan, configured, digest
from megamoe.apps.lab.study import OF_LAB, Stage
from megamoe.config.files import LARGEST_FILE, merge, read_mapping
from megamoe.config.load import apply_override, configure
from megamoe.config.schema import RunConfig
from megamoe.config.yaml_text import dump
from megamoe.errors import UserError
from megamoe.io import read_plain, reason
from megamoe.metrics.names import of_validation_set

COMMANDS = ("-m", "megamoe.cli")
RESULT = {  # of a stage, in its folder
    "finetune": "results.json",
    "translate": "scores.json",
    "analyze": "routing.json",
    "evaluate": "rows.json",
}
DEFAULTS = {"log": {"report": False}}  # the study has a page of its own
STOPS = ("exit_after_steps", "exit_after_minutes")  # of `train`: of a launch, and not of the run


@dataclass(frozen=True)
class Task:
    """One process.

    folder: the run's, or the stage's. arguments: of `python`. identity: a digest of all that decides the
    result. needs: names of tasks that must be complete. checkpoints_of: a run all of whose checkpoints are
    further arguments. configuration: the YAML that it reads, as file and text. steps: of a training run.
    alone: no other task runs at the same time.
    """

    name: str
    folder: Path
    arguments: tuple[str, ...]
    identity: str
    needs: tuple[str, ...] = ()
    checkpoints_of: Path | None = None
    configuration: tuple[Path, str] | None = None
    steps: int = 0
    alone: bool = False


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


def tuning_tasks(plan: Plan, output: Path) -> tuple[Tasks, dict[str, list[list[Task]]]]:
    """Return the tasks that tune the rows, and those that decide each row's value, a list for each value."""
    tuning = plan.size.tuning
    tasks = Tasks()
    if tuning is None:
        return tasks, {}
    of_rows: dict[str, list[list[Task]]] = {row: [] for row in plan.tuning_configs}
    known = plan.all_configs if plan.study.tuned_rows is None else plan.tuning_configs
    overrides = [f"{tuning.key}={json.dumps(value)}" for value in tuning.values]
    trees = [
        {row: _with(merge(config, tuning.set), override) for row, config in known.items()}
        for override in overrides
    ]
    sharing = [_sharing(of_value) for of_value in trees]
    for row in plan.tuning_configs:
        for number, of_value in enumerate(trees):
            name = f"tuning-{sharing[number][row]}-{number}"
            task = _training(plan, output, row, name, of_value[row], tuning.seed, tuning.by)
            of_rows[row].append([tasks.add(task)])
    if plan.study.tuned_rows is not None:
        together = [[task for [task] in of_value] for of_value in zip(*of_rows.values(), strict=True)]
        of_rows = dict.fromkeys(plan.configs, together)
    return tasks, of_rows


def planned_tasks(plan: Plan, output: Path) -> Tasks:
    """Return the tasks of all rows as if each took the first of the tuned values: names and chains hold."""
    tuning = plan.size.tuning
    return study_tasks(plan, output, {} if tuning is None else dict.fromkeys(plan.configs, tuning.values[0]))


def study_tasks(plan: Plan, output: Path, tuned: dict[str, Any], without: Collection[str] = ()) -> Tasks:
    """Return the tasks of all rows and seeds.

    tuned: the value of the tuned key by row. without: rows that are not trained, because no run of their
    tuning has succeeded.
    """
    tasks, tuning = Tasks(), plan.size.tuning
    rows = [row for row in plan.configs if row not in without]
    trees = dict(plan.all_configs)
    if tuning is not None:  # rows of one configuration have one value; which one decides no name
        trees = {row: _with(config, f"{tuning.key}=null") for row, config in trees.items()}
    sharing = _sharing(trees)
    for row in rows:
        tree = plan.configs[row]
        if tuning is not None and row in tuned:
            tree = _with(tree, f"{tuning.key}={json.dumps(tuned[row])}")
        for seed in plan.size.seeds:
            task = _training(plan, output, row, f"{sharing[row]}-{seed}", tree, seed)
            tasks.training[row, seed] = tasks.add(task)
    for name, stage in plan.study.stages.items():
        of_stage = [row for row in (trees if stage.rows is None else stage.rows) if row in trees]
        sharing = _sharing({row: [trees[row], _of_row(plan, stage, row)] for row in of_stage})
        for row in [row for row in of_stage if row in rows]:
            for seed in plan.size.seeds:
                task_name = f"{name}-{sharing[row]}-{seed}"
                task = _of_stage(plan, output, (name, stage), row, tasks.training[row, seed], seed, task_name)
                tasks.stages[name, row, seed] = tasks.add(task)
    return tasks


def configuration_digests(plan: Plan, tuned: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each row's configuration with its tuned value, which the runs of all seeds share.

    It is of the keys that the YAML has, in any order, so a new default of another key does not change it.
    """
    found = {}
    for row, tree in plan.configs.items():
        if plan.size.tuning is not None and row in tuned:
            tree = _with(tree, f"{plan.size.tuning.key}={json.dumps(tuned[row])}")
        found[row] = digest({key: value for key, value in tree.items() if key not in OF_LAB})
    return found


def _with(config: dict[str, Any], override: str) -> dict[str, Any]:
    tree = merge(config, {})
    apply_override(tree, override)
    return tree


def _sharing(trees: dict[str, Any]) -> dict[str, str]:
    """Return for each row the first one with the same configuration, whose name their tasks have.

    That is so if the call names others by `--rows` too.
    """
    return {row: next(each for each in trees if trees[each] == trees[row]) for row in trees}


def _of_row(plan: Plan, stage: Stage, row: str) -> dict[str, Any]:
    """Return what a row's keys change in a stage."""
    return {} if stage.finetune is None else plan.study.rows[row].finetune


def _training(
    plan: Plan, output: Path, row: str, name: str, tree: dict[str, Any], seed: int, by: str | None = None
) -> Task:
    """Return the task of a run, after a check of its configuration. by: a metric that it should record."""
    runs = output / "runs"
    tree = merge(DEFAULTS, tree)
    stops: list[str] = []
    if isinstance(train := tree.get("train"), dict):
        tree["train"] = {key: value for key, value in train.items() if key not in STOPS}
        stops = [f"train.{key}={json.dumps(train[key])}" for key in STOPS if key in train]
    unnamed = tree
    tree = merge(tree, {"name": name, "output": str(runs), "seed": seed})
    config = configured(plan, row, tree, stops)
    if by is not None:
        _check_recorded(plan, row, config, by)
    # A run without plugins, or without a DeepSpeed file, has the identity that it had before these counted.
    plugins = {"plugins": registry.plugin_digests(config.plugins)} if config.plugins else {}
    deepspeed = config.parallel.deepspeed
    files = [] if deepspeed is None else [_text(Path(deepspeed), f"{plan.path}: row {row}")]
    identity = digest("train", {**unnamed, **plugins}, seed, plan.size.ranks, *files)
    path = output / "configurations" / f"{name}.yaml"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.size.ranks))
    arguments = (*(launcher if plan.size.ranks > 1 else ()), "-m", "megamoe", "--config", str(path))
    return Task(
        name,
        runs / name,
        (*arguments, "checkpoint.resume=auto", *stops),
        identity,
        configuration=(path, dump(tree)),
        steps=config.train.steps or 0,
    )


def _check_recorded(plan: Plan, row: str, config: RunConfig, by: str) -> None:
    """Refuse to tune by a metric of data on which the run is not evaluated: it would show after the run."""
    sets = {name for name, share in zip(("val", "test"), config.data.split[1:], strict=False) if share > 0}
    sets |= {of_validation_set(name) for name in config.data.validation}
    of_set, _, metric = by.rpartition("/")
    if by.startswith(("val/", "test/")) and of_set not in sets:
        known = ", ".join(f"{each}/{metric}" for each in sorted(sets)) or "none: the run has no such data"
        raise UserError(f"{plan.path}: tuning.by: row {row} does not record {by!r}; expected {known}")


def _text(path: Path, where: str) -> str:
    try:
        return read_plain(path, LARGEST_FILE).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: parallel.deepspeed: cannot read {str(path)!r}: {reason(error)}") from None


def _of_stage(
    plan: Plan, output: Path, named: tuple[str, Stage], row: str, run: Task, seed: int, task_name: str
) -> Task:
    """Return the task of a stage.

    Its identity is of what decides its result, and not of where files are: rows that share their runs share
    what is done with them.
    """
    name, stage = named
    where = f"{plan.path}: stages.{name}"
    folder = output / "stages" / name / task_name.removeprefix(f"{name}-")
    result = folder / RESULT[stage.kind]
    path = str(run.folder)
    checkpoints_of = None
    decides: list[Any] = []  # besides the settings
    if stage.finetune is not None:
        given = merge(merge(stage.finetune.set, plan.size.finetune), _of_row(plan, stage, row))
        given = given | {"seeds": given.get("seeds", [seed])}
        settings = [f"task.{key}={json.dumps(value)}" for key, value in given.items()] + plan.task_overrides
        task_file = plan.path.parent / stage.finetune.task
        decides = [read_mapping(task_file, f"{where}.finetune.task")]
        with _told(f"{where}.finetune: row {row}"):
            load_task(task_file, settings)
        places = ["--task", str(task_file), "--checkpoint", path, "--output", str(folder)]
    elif stage.translate is not None:
        chosen = stage.translate
        settings = ["--from", chosen.source, "--to", chosen.target, "--score", "--beams", str(chosen.beams)]
        settings += _samples(plan, chosen.samples)
        places = [path, "--json", str(result)]
    elif stage.analyze is not None:
        analyses = stage.analyze
        settings = ["--analyses", ",".join(analyses.analyses), *_samples(plan, analyses.samples)]
        decides = [analyses.of]
        checkpoints_of = run.folder if analyses.of == "all" else None
        places = ["--output", str(folder), *([] if checkpoints_of is not None else [path])]
    else:
        assert stage.evaluate is not None
        swept = stage.evaluate.sweep.items()
        with _told(f"{where}.evaluate.sweep: row {row}"):
            for override in (f"{key}={json.dumps(value)}" for key, values in swept for value in values):
                configure(merge(plan.configs[row], {}), [override])
        sweeps = [f"{key}={','.join(map(json.dumps, values))}" for key, values in swept]
        settings = [each for sweep in sweeps for each in ("--sweep", sweep)]
        settings += _samples(plan, stage.evaluate.samples)
        places = [path, "--json", str(result)]
    identity = digest(stage.kind, settings, decides, [run.identity])
    arguments = (*COMMANDS, stage.kind, *settings, *places)  # in this order: checkpoints may follow
    return Task(task_name, folder, arguments, identity, (run.name,), checkpoints_of, alone=stage.alone)


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Add the key to a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _samples(plan: Plan, of_stage: int | None) -> list[str]:
    samples = plan.size.samples or of_stage
    return [] if samples is None else ["--samples", str(samples)]
