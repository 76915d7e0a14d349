"""Deleting old checkpoints, but never the one that a resume takes, and never the newest intact one."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from megamoe.apps.checkpoints import verify
from megamoe.apps.checkpoints.describe import file_sizes, size
from megamoe.apps.checkpoints.stream import CONVERTING, OLD_S, age_s
from megamoe.checkpoint.format.folder import (
    DELETING,
    REPLACED,
    SAVING,
    candidates,
    find_checkpoints,
    has_run_name,
    hide,
)
from megamoe.errors import UserError


def prune(run: Path, keep: int, damaged: bool, dry_run: bool, report: Callable[[str], None]) -> None:
    """Delete a run's old checkpoints, and report each. The other arguments are those of `find_deletions`.

    dry_run: report what would be deleted, and delete nothing.

    Raises:
        UserError: if `run` is not a run's folder, or something cannot be deleted.
    """
    if keep < 1:
        raise UserError(f"--keep: {keep} would leave no checkpoint; keep at least 1")
    paths, is_run = find_checkpoints(run)
    if not is_run:
        raise UserError(f"{run}: a single checkpoint; name the run's folder, runs/<name>")
    freed = 0
    for path, reason in find_deletions(paths, keep, damaged, report):
        num_bytes = sum(file_sizes(path).values())
        if not dry_run:
            _delete(path)
        freed += num_bytes
        report(f"{'would delete' if dry_run else 'deleted'} {path} ({reason}): {num_bytes:,} bytes")
    report(f"{'would free' if dry_run else 'freed'} {freed:,} bytes ({size(freed)})")


def find_deletions(
    paths: list[Path], keep: int, damaged: bool, report: Callable[[str], None]
) -> Iterator[tuple[Path, str]]:
    """Yield what to delete in a folder, and why: intact checkpoints but the newest `keep`, and leftovers of
    killed saves.

    Damaged checkpoints do not count as kept ones. They are deleted if `damaged`, else kept and reported.
    Those that a user renamed, or a fetch set aside, do not count either; they are kept and reported.
    """
    folder = paths[0].parent
    order = candidates(folder)  # the order of a resume: what `latest` names first, then the newest
    broken = {path: it for path in paths if (it := next(verify.problems(path), None))}
    intact = [path for path in order if path not in broken and has_run_name(path)]
    newest = sorted(intact, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    kept = {*intact[:keep], *newest[:1]}
    for path in paths:
        if path.is_symlink():
            report(f"kept {path}: a link")
        elif not has_run_name(path):
            report(f"kept {path}: it was renamed")
        elif path in broken and damaged:
            yield path, "damaged"
        elif path in broken:
            report(f"kept {path}: damaged, {broken[path]}; --damaged deletes it")
        elif path not in kept:
            yield path, "old"
    yield from _leftovers(folder, {path.name for path in intact})


def _leftovers(folder: Path, intact: set[str]) -> Iterator[tuple[Path, str]]:
    for prefix in (SAVING, DELETING, REPLACED, CONVERTING):
        for path in sorted(folder.glob(f"{prefix}*")):
            in_use = prefix == REPLACED and path.name.removeprefix(REPLACED) not in intact
            if path.is_dir() and not path.is_symlink() and not in_use and age_s(path) > OLD_S:
                yield path, "left by a save that was killed"


def _delete(path: Path) -> None:
    try:
        with suppress(FileNotFoundError):  # deleted by the run itself meanwhile
            hidden = path if path.name.startswith(DELETING) else hide(path)
            shutil.rmtree(hidden)
    except OSError as error:
        raise UserError(f"{path}: cannot be deleted: {error.strerror}") from None
    if os.path.lexists(path):
        raise UserError(f"{path}: cannot be deleted")
