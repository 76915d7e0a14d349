"""The run's folder: begun anew, gone on with, or refused. Nothing is touched before all checks."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.config import RunConfig, dump_yaml
from megamoe.errors import UserError
from megamoe.parallel.checkpoints import integrity
from megamoe.parallel.checkpoints.files import damaged
from megamoe.parallel.checkpoints.folder import candidates
from megamoe.parallel.checkpoints.meta import read_meta

CONFIG = "config.yaml"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes.

    candidates: checkpoints to go on from, of which the first intact one is taken; none: it starts from step
    0. continues: the records in the folder are this run's and are appended to; otherwise what is there is
    replaced.
    """

    path: Path
    candidates: tuple[Path, ...]
    continues: bool

    @property
    def resume_from(self) -> Path | None:
        """The first candidate whose JSON is intact.

        Raises:
            UserError: if there are candidates and none is.
        """
        for path in self.candidates:
            if integrity.first(integrity.small_problems(path)) is None:
                return path
        for path in self.candidates:
            read_meta(path)  # says it better where it can
            raise damaged(path, integrity.first(integrity.small_problems(path)))
        return None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"


def choose_run_folder(config: RunConfig) -> RunFolder:
    """Decide by `checkpoint.resume`, `overwrite` and what is on the disk; writes nothing.

    Raises:
        UserError: if the folder holds a run and neither going on nor overwriting was asked for, or holds
            something that is no run.
    """
    path = Path(config.output) / config.name
    resume = config.checkpoint.resume
    checkpoints = path / "checkpoints"
    if resume == "auto":
        found = tuple(candidates(checkpoints))
        if found:
            return RunFolder(path, found, continues=True)
    explicit = () if resume in ("auto", "never") else (Path(resume),)
    if explicit and explicit[0].resolve().is_relative_to(checkpoints.resolve()):
        return RunFolder(path, explicit, continues=True)
    if path.is_file() or (path.exists() and any(path.iterdir())):
        if not (path / CONFIG).is_file():
            raise UserError(f"output: {path} is no run's folder (it has no {CONFIG}); choose another name")
        if resume != "auto" and not config.overwrite:
            raise UserError(
                f"run folder {path} exists: add --resume to go on with it, overwrite=true to begin anew, "
                "or name=... for another one"
            )
    return RunFolder(path, explicit, continues=False)


def prepare_run_folder(folder: RunFolder, config: RunConfig, summary: dict[str, Any]) -> None:
    """Make the folder (emptied unless the run continues in it), with config.yaml and summary.json.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        if not folder.continues and folder.path.exists():
            _clear(folder.path, delete=config.overwrite)
        folder.path.mkdir(parents=True, exist_ok=True)
        _write(folder.path / CONFIG, dump_yaml(config))
        _write(folder.path / SUMMARY, json.dumps(summary, indent=1))
    except OSError as error:
        raise UserError(f"output: cannot write the run folder {folder.path}: {error.strerror}") from None


def _clear(path: Path, delete: bool) -> None:
    """Delete what may be overwritten; set aside an attempt that left no checkpoint."""
    if delete or not any(path.iterdir()):
        shutil.rmtree(path)
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.before-{number}")).exists():
        number += 1
    os.replace(path, aside)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
