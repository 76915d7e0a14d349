"""A run's folder of checkpoints: which ones it has, and which of them a resume takes.

checkpoints/step_00000100/     see `files`
checkpoints/latest             the name of the newest complete checkpoint
"""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megamoe.checkpoint.format.files import META, SUMS, read_bytes
from megamoe.errors import UserError

LATEST = "latest"
KEPT = "hf"  # beside `checkpoints` in an imported run: the files of a Hugging Face folder that are no weights
SAVING, REPLACED, DELETING = ".saving_", ".replaced_", ".deleting_"  # prefixes of a checkpoint's name
RUN_CHECKPOINT = re.compile(rf"(?:{re.escape(REPLACED)})?step_[0-9]{{8,}}")


def candidates(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run's folder, in the order in which a resume tries them.

    The first is the one that `latest` names. The others follow by the time of saving, newest first, and not
    by step: a run that resumed from an earlier step has newer checkpoints with smaller numbers.

    Raises:
        UserError: if the folder cannot be read.
    """
    names = _names(folder)
    found = [folder / name for name in names if name.startswith("step_")]
    # While a step is saved again, there is a moment when its earlier checkpoint exists under this name alone.
    found += [
        folder / name
        for name in names
        if name.startswith(f"{REPLACED}step_") and name.removeprefix(REPLACED) not in names
    ]
    dated = [(date, path) for path in found if (date := _saved_at(path))]
    named = _named_by_latest(folder)
    return [path for _, path in sorted(dated, key=lambda pair: (pair[1].name != named, -pair[0]))]


def has_run_name(path: Path) -> bool:
    """Return whether a run gave the checkpoint its name. One that a user renamed is never deleted."""
    return RUN_CHECKPOINT.fullmatch(path.name) is not None


def _names(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except OSError as error:  # silence would make a run start from scratch
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not folder.exists():
            return set()
        raise UserError(f"{folder}: cannot be read ({error.strerror}); make it readable") from None


def _saved_at(path: Path) -> int:
    """Return when its last file was written, in ns; 0 if it is no checkpoint. Either file may be missing."""
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
    """Return ([the checkpoint], False) for a checkpoint, and (all checkpoints by name, True) for a run's
    folder.

    A run's folder is one with checkpoints in it or in its subfolder `checkpoints`. An incomplete checkpoint
    counts if it has a checkpoint's name.

    Raises:
        UserError: if `path` is neither.
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


def kept_folder(checkpoint: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the folder `hf` of the import that made a checkpoint, or the one that its run started from.

    config: of the checkpoint's metadata. None: neither was imported.
    """
    init = (config.get("checkpoint") or {}).get("init") or {}
    places = [checkpoint, *([Path(init["path"])] if isinstance(init.get("path"), str) else [])]
    found = [place.parent.parent / KEPT for place in places]
    return next((place for place in found if (place / "config.json").is_file()), None)


def inode_of(path: Path) -> int:
    """Return by what a folder is told from another one of its name; 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def hide(path: Path) -> Path:
    """Rename a checkpoint so that nobody loads it while `remove` deletes it; return the new path."""
    gone = path.with_name(f"{DELETING}{path.name.lstrip('.')}")
    remove(gone)
    os.replace(path, gone)
    return gone


def remove(*paths: Path) -> None:
    """Delete those folders that exist; of a link, the link alone."""
    for path in paths:
        if path.is_symlink():
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
