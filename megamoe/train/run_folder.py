"""The run's folder: created, continued or refused. Nothing is changed before all checks."""

import json
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import damaged
from megamoe.checkpoint.format.folder import candidates
from megamoe.checkpoint.format.meta import read_meta
from megamoe.config import RunConfig, dump_yaml
from megamoe.errors import UserError
from megamoe.io import CONFIG_FILE, SUMMARY_FILE, real, replace_file, unused_name
from megamoe.resilience.processes import LAUNCH, Launch, Mark, mark


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes to.

    candidates: checkpoints to resume from, the first intact one is used; none: the run starts from step 0.
    continues: the records in the folder belong to this run and are appended to; otherwise they are replaced.
    restarted: this launch created or continued the folder and was started again
    (`megamoe.resilience.processes`). newest: the newest checkpoint in it, by `processes.mark`.
    """

    path: Path
    candidates: tuple[Path, ...]
    continues: bool
    restarted: bool = False
    newest: Mark | None = field(default=None, compare=False)

    def check_unchanged(self) -> None:
        """Check, when the folder is locked, that no other launch has saved since the folder was chosen.

        Raises:
            UserError: if there is another newest checkpoint: this launch would go on from an older one.
        """
        if newest_in(self.checkpoints) != self.newest:
            raise UserError(
                f"run folder {self.path}: another launch saves or deletes checkpoints in it; start again"
            )

    @property
    def resume_from(self) -> Path | None:
        """Return the first candidate whose JSON is intact, or None without candidates.

        Raises:
            UserError: if no candidate is intact.
        """
        for path in self.candidates:
            if next(files.problems(path, shares=0), None) is None:
                return path
        for path in self.candidates:
            read_meta(path)  # raises a better message if it can
            raise damaged(path, next(files.problems(path, shares=0)))
        return None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"


def choose_run_folder(config: RunConfig) -> RunFolder:
    """Choose the folder from `checkpoint.resume`, `overwrite` and the disk's content; write nothing.

    Raises:
        UserError: if the folder holds a run and the configuration neither resumes nor overwrites it, or if it
            holds something other than a run.
    """
    newest = newest_in(Path(config.output) / config.name / "checkpoints")  # before the folder is looked at
    return replace(_choose(config), newest=newest)


def newest_in(checkpoints: Path) -> Mark | None:
    """Return the mark of the newest complete checkpoint in a folder of checkpoints; None without one."""
    found = candidates(checkpoints)
    return mark(found[0]) if found else None


def _choose(config: RunConfig) -> RunFolder:
    path = Path(config.output) / config.name
    resume = config.checkpoint.resume
    checkpoints = path / "checkpoints"
    launch = Launch.restarted(path)
    found = tuple(candidates(checkpoints)) if resume == "auto" or launch is not None else ()
    if found and (resume == "auto" or (launch is not None and mark(found[0]) != launch.latest)):
        return RunFolder(path, found, continues=True, restarted=launch is not None)
    explicit = () if resume in ("auto", "never") else (Path(resume),)
    if explicit and real(explicit[0]).is_relative_to(real(checkpoints)):
        return RunFolder(path, explicit, continues=True, restarted=launch is not None)
    if launch is not None:
        return RunFolder(path, explicit, continues=False, restarted=True)
    if path.is_file() or (path.exists() and any(path.iterdir())):
        if not (path / CONFIG_FILE).is_file():
            raise UserError(
                f"output: {path} is no run's folder (it has no {CONFIG_FILE}); choose another name"
            )
        if resume != "auto" and not config.overwrite:
            raise UserError(
                f"run folder {path} exists: add --resume to go on with it, overwrite=true to begin anew, "
                "or name=... for another one"
            )
    if explicit and real(explicit[0]).is_relative_to(real(path)):
        raise UserError(
            f"checkpoint.resume: {explicit[0]} lies in the run folder {path}, which overwrite=true would "
            "delete; set name=... to another one"
        )
    return RunFolder(path, explicit, continues=False)


def prepare_run_folder(
    folder: RunFolder, config: RunConfig, summary: dict[str, Any], launch: Launch | None = None
) -> None:
    """Create the folder with config.yaml and summary.json, emptied unless the run continues in it.

    launch: the identity of the launch; its workers may be started again and must then recognise the folder.

    Raises:
        UserError: if it cannot be written.
    """
    path = folder.path
    try:
        if folder.continues:
            _fill(path, config, summary)
            if not folder.restarted:  # else it is there, and says what was there when the launch began
                _write_launch(path, launch)
            return
        # Atomic, even if this process is killed.
        fresh, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)
        fresh.mkdir(parents=True)
        _fill(fresh, config, summary)
        _write_launch(fresh, launch)
        if path.exists() and any(path.iterdir()):
            # Otherwise it is an attempt's, without a checkpoint.
            os.replace(path, old if config.overwrite and not folder.restarted else unused_name(path))
        os.replace(fresh, path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"output: cannot write the run folder {path}: {error.strerror}") from None


def _fill(path: Path, config: RunConfig, summary: dict[str, Any]) -> None:
    replace_file(path / CONFIG_FILE, dump_yaml(config).encode())
    replace_file(path / SUMMARY_FILE, json.dumps(summary, indent=1).encode())


def _write_launch(path: Path, launch: Launch | None) -> None:
    if launch is None:
        (path / LAUNCH).unlink(missing_ok=True)
    else:
        replace_file(path / LAUNCH, launch.dump().encode())
