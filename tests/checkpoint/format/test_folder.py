"""A folder of checkpoints that is none."""

from pathlib import Path

import pytest

from megamoe.checkpoint.format.folder import candidates
from megamoe.errors import UserError


def test_where_nothing_is_there_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file in the output's place: told where the run's folder is made")
    assert candidates(tmp_path / "none") == candidates(tmp_path / "runs/a/checkpoints") == []


def test_a_file_in_its_place_is_reported(tmp_path: Path) -> None:
    """Otherwise a run would start from step 0."""
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=r"checkpoints: cannot be read \(Not a directory\)"):
        candidates(tmp_path / "checkpoints")
