"""Old checkpoints deleted: never the one that a resume takes, never what alone is intact."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megamoe.checkpoint.format import integrity
from megamoe.checkpoint.format.folder import (
    DELETING,
    REPLACED,
    SAVING,
    candidates,
    find_checkpoints,
    hide,
)
from megamoe.checkpoint.tools import verify
from megamoe.checkpoint.tools.describe import file_sizes, size
from megamoe.checkpoint.tools.stream import CONVERTING, OLD_S, age_s
from megamoe.errors import UserError


@dataclass(frozen=True)
class Doomed:
    """A folder that is to be deleted."""

    path: Path
    why: str
    bytes: int


def prune(run: Path, keep: int, damaged: bool, dry_run: bool, say: Callable[[str], None]) -> None:
    """Delete what `doomed` names, and say it.

    Raises:
        UserError: if `run` is no run's folder, or something cannot be deleted.
    """
    if keep < 1:
        raise UserError(f"--keep: {keep} would leave no checkpoint; keep at least 1")
    paths, is_run = find_checkpoints(run)
    if not is_run:
        raise UserError(f"{run}: a single checkpoint; name the run's folder, runs/<name>")
    freed = 0
    for each in doomed(paths, keep, damaged, say):
        if not dry_run:
            _delete(each.path)
        freed += each.bytes
        say(f"{'would delete' if dry_run else 'deleted'} {each.path} ({each.why}): {each.bytes:,} bytes")
    say(f"{'would free' if dry_run else 'freed'} {freed:,} bytes ({size(freed)})")


def doomed(paths: list[Path], keep: int, damaged: bool, say: Callable[[str], None]) -> Iterator[Doomed]:
    """Of the checkpoints of one folder: intact ones beyond the newest `keep`, and what killed saves left.

    Damaged ones count for nothing: they are kept and told, unless `damaged`.
    """
    folder = paths[0].parent
    order = candidates(folder)  # a resume's: what `latest` names first, then the newest
    broken = {path: it for path in paths if (it := integrity.first(verify.problems(path)))}
    intact = [path for path in order if path not in broken]
    newest = sorted(intact, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    kept = {*intact[:keep], *newest[:1]}
    for path in paths:
        if path.is_symlink():
            say(f"kept {path}: a link")
        elif path in broken and damaged:
            yield _doomed(path, "damaged")
        elif path in broken:
            say(f"kept {path}: damaged, {broken[path]}; --damaged deletes it")
        elif path not in kept:
            yield _doomed(path, "old")
    yield from _leftovers(folder, {path.name for path in intact})


def _leftovers(folder: Path, intact: set[str]) -> Iterator[Doomed]:
    for prefix in (SAVING, DELETING, REPLACED, CONVERTING):
        for path in sorted(folder.glob(f"{prefix}*")):
            in_use = prefix == REPLACED and path.name.removeprefix(REPLACED) not in intact
            if path.is_dir() and not path.is_symlink() and not in_use and age_s(path) > OLD_S:
                yield _doomed(path, "left by a save that was killed")


def _doomed(path: Path, why: str) -> Doomed:
    return Doomed(path, why, sum(file_sizes(path).values()))


def _delete(path: Path) -> None:
    try:
        with suppress(FileNotFoundError):  # deleted by the run itself meanwhile
            hidden = path if path.name.startswith(DELETING) else hide(path)
            shutil.rmtree(hidden)
    except OSError as error:
        raise UserError(f"{path}: cannot be deleted: {error.strerror}") from None
    if os.path.lexists(path):
        raise UserError(f"{path}: cannot be deleted")
