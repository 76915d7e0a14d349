"""Which checkpoints a run keeps when it publishes another one, and what it deletes before."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megamoe.checkpoint.manager import Checkpoints


def made(path: Path, minute: int) -> Path:
    """A folder that looks like a checkpoint, of a time."""
    path.mkdir()
    (path / "checkpoint.json").write_text("{}")
    os.utime(path / "checkpoint.json", (60 * minute, 60 * minute))
    return path


def test_a_renamed_checkpoint_stays_and_does_not_count(tmp_path: Path) -> None:
    for minute, name in enumerate(("step_00000001", "step_00000002", "step_00000002_best"), 1):
        made(tmp_path / name, minute)
    written = made(tmp_path / ".saving_step_00000003", 3)
    save: Any = SimpleNamespace(folder=written, final=tmp_path / "step_00000003")
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints._publish(save, {})
    checkpoints.close()
    kept = ["step_00000002", "step_00000002_best", "step_00000003"]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == kept


def test_what_killed_saves_left_goes_with_the_next_save(tmp_path: Path) -> None:
    """But for a checkpoint whose replacement never got its place."""
    for name in (".saving_step_00000002", ".deleting_replaced_step_00000009", ".replaced_step_00000004"):
        (tmp_path / name).mkdir()
    Checkpoints(tmp_path, keep=2)._make_folder(tmp_path / ".saving_step_00000003")
    left = [".replaced_step_00000004", ".saving_step_00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
