"""Tasks of the harness from folders of files, and their evaluation on a trained model."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.errors import UserError
from megamoe.redaction import line_of

SHOWN_NAMES = 8


def check_installed() -> None:
    """Check that lm-evaluation-harness is there.

    Raises:
        UserError: if it is not.
    """
    if find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed; pip install 'megamoe[eval]'")


def loaded_tasks(names: Sequence[str], folders: Sequence[Path]) -> tuple[Any, list[str]]:
    """Return the harness' task manager and the names of the tasks, which are built once to find mistakes.

    folders: of task files; none: the tasks that come with the harness.

    Raises:
        UserError: if the harness or a folder is missing, a name is unknown, or a task cannot be built.
    """
    check_installed()
    from lm_eval.tasks import TaskManager

    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--include: {folder} is no folder; name one with task files (YAML)")
    try:
        manager = TaskManager(include_path=list(folders), include_defaults=not folders)
    except Exception as error:  # the harness raises anything on a broken task file
        raise UserError(f"--include: {_one_line(error)}") from error
    known = manager.all_tasks
    if not names:
        raise UserError(f"--tasks: found none, expected some of {_some(known)}")
    for name in names:
        if name not in known:
            raise UserError(f"--tasks: {name!r} is not known, expected some of {_some(known)}")
        try:
            manager.load([name])
        except Exception as error:
            raise UserError(f"--tasks: {name} cannot be loaded: {_one_line(error)}") from error
    return manager, list(names)


def evaluated(
    trained: TrainedModel,
    tasks: tuple[Any, list[str]],
    model_options: dict[str, Any],
    num_fewshot: int | None = None,
    limit: int | None = None,
    report: Callable[[str], None] = print,
) -> tuple[dict[str, Any], str]:
    """Return the harness' results, and its table of them. Collective over all ranks.

    tasks: of `loaded_tasks`. model_options: of `megamoe.apps.lm_eval.model.Megamoe`.

    Raises:
        UserError: as `Megamoe`, and for a task that the model cannot answer.
    """
    import lm_eval
    from lm_eval.utils import make_table

    from megamoe.apps.lm_eval.model import Megamoe

    manager, names = tasks
    model = Megamoe(trained, **model_options)
    for note in model.notes:
        report(note)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=names,
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=1000,
    )
    # None where LOCAL_RANK is not 0; the others have the same answers.
    return (found, make_table(found)) if found is not None else ({}, "")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES])}{more}" or "(no task file was found)"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {line_of(error)}"[:300]
