"""The run's folder: begun anew, gone on with, or refused. Nothing that exists is touched before all checks."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.config import RunConfig, dump_yaml
from megamoe.errors import UserError
from megamoe.parallel.checkpoint import Checkpoints

CONFIG = "config.yaml"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and what it goes on from (None: it starts from step 0)."""

    path: Path
    resume_from: Path | None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"


def choose_run_folder(config: RunConfig) -> RunFolder:
    """Decide by `checkpoint.resume`, `overwrite` and what is on the disk; writes nothing.

    Raises:
        UserError: if the folder holds a run and neither going on nor overwriting was asked for, or the
            checkpoint to go on from does not exist.
    """
    path = Path(config.output) / config.name
    resume = config.checkpoint.resume
    if resume not in ("never", "auto"):
        return RunFolder(path, Path(resume))
    if resume == "auto":
        latest = Checkpoints(path / "checkpoints", config.checkpoint.keep, config.parallel.expert).latest()
        return RunFolder(path, latest)
    if path.exists() and any(path.iterdir()) and not config.overwrite:
        raise UserError(
            f"run folder {path} exists: add --resume to go on with it, overwrite=true to begin anew, "
            "or name=... for another one"
        )
    if path.exists() and any(path.iterdir()) and not (path / CONFIG).is_file():
        raise UserError(
            f"overwrite: {path} is not a run's folder (it has no {CONFIG}); choose another name or output"
        )
    return RunFolder(path, None)


def prepare_run_folder(folder: RunFolder, config: RunConfig, summary: dict[str, Any]) -> None:
    """Make the folder (emptied if the run starts anew), with the resolved configuration and summary.json.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        if folder.resume_from is None and folder.path.exists():
            shutil.rmtree(folder.path)
        folder.path.mkdir(parents=True, exist_ok=True)
        _write(folder.path / CONFIG, dump_yaml(config))
        _write(folder.path / SUMMARY, json.dumps(summary, indent=1))
    except OSError as error:
        raise UserError(f"output: cannot write the run folder {folder.path}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
