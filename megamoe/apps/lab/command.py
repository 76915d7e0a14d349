"""Run a study: configurations over seeds, what is measured of them, and what the claims come to.

python tools/lab.py yang2024_table1 --size smoke
python tools/lab.py yang2024_table1 --size cpu --workers 2
python tools/lab.py my_study.yaml --size gpu --workers 16 --launcher "srun --ntasks=1 --gpus=1 --time=4:00:00"
python tools/lab.py --list
python tools/lab.py tournament --size cpu --power docs/lab/tournament/results.json

STUDY is a YAML, or the name of one in examples/studies. Only what is missing is run: the same command goes
on where an earlier one stopped. The results are in OUTPUT/page: index.md and results.json.

Exit code 1: a run failed, or no run has the metric of a measure or curve.
"""

import argparse
import fcntl
import json
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from megamoe.apps.command import check_positive, parser_of, run_tool
from megamoe.config.files import LARGEST_FILE
from megamoe.errors import UserError
from megamoe.io import read_plain, reason

STUDIES = Path("examples/studies")
MARK = ".lab"  # in a folder of a study; its lock
WAIT_S = 10.0  # for the lock


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code: that of `run_tool`, or 1 if `_run` found a problem."""
    options = _parser().parse_intermixed_args(arguments)
    failed: list[str] = []
    return run_tool(lambda: _run(options, failed)) or int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("study", nargs="?", metavar="STUDY", help="a YAML, or the name of one in examples/studies")
    keys = "of every run; task.KEY=VALUE: of fine-tuning"
    add("overrides", nargs="*", metavar="section.key=value", help=keys)
    add("--size", choices=("smoke", "cpu", "gpu"), default="smoke", help="default: smoke")
    add("--seeds", type=int, metavar="N", help="take the seeds 1 to N; default: the study's")
    add("--rows", type=lambda text: text.split(","), metavar="NAME,...", help="these rows and their claims")
    add("--output", type=Path, metavar="DIR", help="default: runs/lab/<study>_<size>")
    add("--workers", type=int, metavar="N", help="processes at a time; default: as many as GPUs, or cores")
    add("--overwrite", action="store_true", help="begin anew in the output folder")
    shown = "say what the study's seeds can show, by the spread in a results.json, and end"
    add("--power", type=Path, metavar="RESULTS", help=shown)
    words = "before each run's command, as srun"
    add("--launcher", type=shlex.split, default=[], metavar="WORDS", help=words)
    add("--list", action="store_true", help="list the studies of examples/studies, and end")
    return parser


def _run(options: argparse.Namespace, failed: list[str]) -> None:
    """failed: receives a line for each run that failed, and for each metric that no run has."""
    if options.list:
        _list()
        return
    if options.study is None:
        raise UserError("STUDY: none is named; --list shows those of examples/studies")
    check_positive("--seeds", options.seeds)
    check_positive("--workers", options.workers)
    plan = _plan(options)
    if options.power is not None:
        _show_power(plan, options.power)
        return
    output = options.output or Path("runs/lab") / f"{plan.name}_{plan.size_name}"
    lock = _open_folder(output, options.overwrite)
    try:
        _introduce(plan, output)
        failed += _run_study(plan, output, options, lock)
    finally:
        os.close(lock)


def plan_of(command: str) -> Any:
    """Return the plan of a results.json's command, from the repository's root; see `load_plan`."""
    return _plan(_parser().parse_intermixed_args(shlex.split(command)[2:]))


def _plan(options: argparse.Namespace) -> Any:
    from megamoe.apps.lab.plan import load_plan

    return load_plan(_path_of(options.study), options.size, options.seeds, options.overrides, options.rows)


def _path_of(study: str) -> Path:
    path = Path(study)
    if path.suffix in (".yaml", ".yml") or path.exists():
        return path
    known = sorted(each.stem for each in STUDIES.glob("*.yaml"))
    if study in known:
        return STUDIES / f"{study}.yaml"
    from megamoe.registry import nearest_and_all

    raise UserError(f"STUDY: no file {study!r} and no study of {STUDIES}{nearest_and_all(study, known)}")


def _list() -> None:
    from megamoe.apps.lab.study import load_study

    for path in sorted(STUDIES.glob("*.yaml")):
        study = load_study(path)
        times = "; ".join(f"{name}: {size.time}" for name, size in study.sizes.items())
        source = f" ({study.source})" if study.source else ""
        print(f"{path.stem}: {study.title}{source}. {times}")


def _open_folder(output: Path, overwrite: bool) -> int:
    """Make the folder of a study or check that it is one; return its lock, an open file.

    Raises:
        UserError: if it holds something else, if another lab runs in it, or if it cannot be written.
    """
    mark = output / MARK
    if output.exists() and not mark.exists() and (output.is_file() or any(output.iterdir())):
        raise UserError(f"--output: {output} holds no study; name another folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror}") from None
    until = time.monotonic() + WAIT_S  # runs of a lab that was killed hold the lock while they save
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > until:
                os.close(handle)
                told = f"another lab, or a run of it, holds {output}; wait for it, or name another folder"
                raise UserError(f"--output: {told}") from None
            time.sleep(0.1)
    if overwrite:
        for path in output.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
    return handle


def _introduce(plan: Any, output: Path) -> None:
    """Print what the study is, and the rows that cannot run; refuse rows and stages that can run nowhere."""
    from megamoe.apps.lab.checks import rows_that_cannot_run
    from megamoe.apps.lab.tasks import planned_tasks

    print(": ".join(filter(None, (plan.study.title, plan.study.source))), flush=True)
    size = plan.size
    print(f"size {plan.size_name}: {len(plan.configs)} rows, seeds {size.seeds}; planned time: {size.time}")
    planned_tasks(plan, output)
    for line in rows_that_cannot_run(plan):
        print(line, flush=True)


def _run_study(plan: Any, output: Path, options: argparse.Namespace, lock: int) -> list[str]:
    """Run what is missing and write the page; return a line for each run that failed, and for each metric
    that no run has.
    """
    from megamoe.apps.lab.page import PAGE, shown_verdict, write_results
    from megamoe.apps.lab.plan import at_looks
    from megamoe.apps.lab.results import results_of
    from megamoe.apps.lab.runner import Runner
    from megamoe.apps.lab.tasks import study_tasks
    from megamoe.apps.lab.tuning import tune, values_of
    from megamoe.apps.lab.verdicts import DECIDED

    ranks, workers = plan.size.ranks, options.workers
    slots: list[str | None] = [None] * (workers or 1)
    if not options.launcher:
        slots = _slots(ranks, workers)
    runner = Runner(output, slots, lambda line: print(line, flush=True), ranks, options.launcher, lock)
    choices = tune(plan, output, runner)
    _tell(plan, choices)
    for look in at_looks(plan):
        tasks = study_tasks(look, output, *values_of(choices))
        runner.run(tasks.by_name.values())
        results = results_of(look, tasks, runner, choices, _command(options))
        if all(claim["verdict"] in DECIDED for claim in results["claims"]):
            break
    page = output / "page"
    write_results(look, results, page)
    for claim in results["claims"]:
        print(f"{shown_verdict(claim['verdict'], claim['comparisons'])}: {claim['text']} ({claim['test']})")
    failed = list(dict.fromkeys(line for row in results["rows"].values() for line in row["failed"]))
    for line in failed:
        print(f"failed: {line}")
    for line in results["unrecorded"]:
        print(line)
    print(f"page: {page / PAGE}")
    # Of some rows, such as dense ones, a metric may be missing by right.
    return failed + (results["unrecorded"] if len(plan.configs) == len(plan.study.rows) else [])


def _tell(plan: Any, choices: dict[str, Any]) -> None:
    """Print what the tuning of each row came to."""
    rule = plan.size.tuning
    if choices and plan.study.tuned_rows is not None:
        choices = {f"all rows, by {' and '.join(plan.study.tuned_rows)}": next(iter(choices.values()))}
    for row, choice in choices.items():
        shown = ", ".join(
            f"{value}: {'no result' if loss is None else f'{loss:.4f}'}"
            for value, loss in zip(choice.values, choice.losses, strict=True)
        )
        chosen = "not tuned, so not trained" if choice.index is None else choice.values[choice.index]
        print(f"{row}: {rule.key} {chosen} ({rule.by} of {shown})", flush=True)


def _slots(ranks: int, workers: int | None) -> list[str | None]:
    """Return a slot for each process at a time: its GPUs, or None on a machine without.

    Raises:
        UserError: if a run has more ranks than there are GPUs.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [None] * (workers or max(1, len(os.sched_getaffinity(0)) // ranks))
    if count < ranks:
        raise UserError(f"ranks: a run of this size has {ranks}, found {count} GPUs; expected as many")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    most = count // ranks
    return [",".join(gpus[at * ranks : (at + 1) * ranks]) for at in range(min(workers or most, most))]


def _show_power(plan: Any, pilot: Path) -> None:
    """Print what the seeds of the plan can show by the spread in a results.json."""
    from megamoe.apps.lab.page import markdown_table
    from megamoe.apps.lab.power import TOLD, power_table

    try:
        table = power_table(plan, json.loads(read_plain(pilot, LARGEST_FILE)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--power: {pilot} is no results.json of a study: {reason(error)}") from None
    print(f"{markdown_table(table)}\n\n{TOLD}")


def _command(options: argparse.Namespace) -> str:
    """Return the command that makes these results, in whatever folder."""
    given = [options.study, "--size", options.size]
    given += [] if options.seeds is None else ["--seeds", str(options.seeds)]
    given += [] if options.rows is None else ["--rows", ",".join(options.rows)]
    return "python tools/lab.py " + shlex.join([*given, *options.overrides])
