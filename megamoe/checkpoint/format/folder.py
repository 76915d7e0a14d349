"""A run's folder of checkpoints: which are there, and which is the one to go on from.

checkpoints/step_00000100/     see `files`
checkpoints/latest             the name of the newest complete one
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from megamoe.checkpoint.format.files import META, SUMS, read_bytes
from megamoe.errors import UserError

LATEST = "latest"
SAVING, REPLACED, DELETING = ".saving_", ".replaced_", ".deleting_"  # before a checkpoint's name
OF_A_RUN = re.compile(rf"(?:{re.escape(REPLACED)})?step_[0-9]{{8,}}")


def candidates(folder: Path) -> list[Path]:
    """The complete checkpoints of a run's folder, the one to go on from first: what `latest` names, then by
    the time of saving (a run resumed from an earlier step has newer ones with smaller numbers).

    Raises:
        UserError: if the folder cannot be read.
    """
    names = _names(folder)
    found = [folder / name for name in names if name.startswith("step_")]
    # Between two renames of a step that was saved again, the earlier one is there under this name alone.
    found += [
        folder / name
        for name in names
        if name.startswith(f"{REPLACED}step_") and name.removeprefix(REPLACED) not in names
    ]
    dated = [(date, path) for path in found if (date := _saved_at(path))]
    named = _named_by_latest(folder)
    return [path for _, path in sorted(dated, key=lambda pair: (pair[1].name != named, -pair[0]))]


def is_of_a_run(path: Path) -> bool:
    """Whether it has the name that a run gives; another is of somebody who wants to keep it."""
    return OF_A_RUN.fullmatch(path.name) is not None


def _names(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except OSError as error:  # told, or a run would begin anew
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not folder.exists():
            return set()
        raise UserError(f"{folder}: cannot be read ({error.strerror}); make it readable") from None


def _saved_at(path: Path) -> int:
    """When its last file was written, in ns; 0 where it is no checkpoint. Either file may be missing."""
    times = [0]
    for file in (path / META, path / SUMS):
        with suppress(FileNotFoundError, NotADirectoryError):
            times += [file.stat().st_mtime_ns] if file.is_file() else []
    return max(times)


def _named_by_latest(folder: Path) -> str | None:
    try:
        return read_bytes(folder / LATEST).decode("utf-8").strip()
    except (OSError, ValueError):
        return None


def find_checkpoints(path: Path) -> tuple[list[Path], bool]:
    """(all in a run's folder, or in its folder `checkpoints`, by name; True), or (that checkpoint, False).

    Also what is no complete checkpoint, if its name is one's.

    Raises:
        UserError: if there is neither.
    """
    if path.is_dir() and any(os.path.lexists(path / name) for name in (META, SUMS)):
        return [path], False
    for folder in (path / "checkpoints", path):
        found = {*folder.glob("step_*"), *candidates(folder)}
        if found:
            return sorted(found, key=lambda path: path.name.removeprefix(REPLACED)), True
    if path.is_dir() and path.name.startswith("step_"):
        return [path], False
    raise UserError(
        f"{path}: no checkpoint and no run's folder with one; name a step_* folder, or runs/<name>"
    )


def hide(path: Path) -> Path:
    """A checkpoint under a name that nobody loads, for `remove`: half deleted it would look damaged."""
    gone = path.with_name(f"{DELETING}{path.name.lstrip('.')}")
    remove(gone)
    os.replace(path, gone)
    return gone


def remove(path: Path) -> None:
    """A folder, if it is there."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
