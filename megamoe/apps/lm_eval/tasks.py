"""Tasks of the harness, from folders of files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megamoe.errors import UserError, listed
from megamoe.redaction import line_of

SHOWN_NAMES = 8


def loaded_tasks(names: Sequence[str], folders: Sequence[Path]) -> Any:
    """Return the harness' task manager; the tasks are built once to find mistakes.

    folders: of task files; none: the tasks that come with the harness.

    Raises:
        UserError: if the harness or a folder is missing, a name is unknown, or a task cannot be built.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("lm-evaluation-harness is not installed; pip install 'megamoe[eval]'") from None

    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--include: {folder} is no folder; name one with task files (YAML)")
    try:
        manager = TaskManager(include_path=list(folders), include_defaults=not folders)
    except Exception as error:  # the harness raises anything on a broken task file
        raise UserError(f"--include: {_one_line(error)}") from error
    known = manager.all_tasks
    some = listed(known, SHOWN_NAMES) or "(no task file was found)"
    if not names:
        raise UserError(f"--tasks: found none, expected some of {some}")
    for name in names:
        if name not in known:
            raise UserError(f"--tasks: {name!r} is not known, expected some of {some}")
        try:
            manager.load([name])
        except Exception as error:
            raise UserError(f"--tasks: {name} cannot be loaded: {_one_line(error)}") from error
    return manager


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {line_of(error)}"[:300]
