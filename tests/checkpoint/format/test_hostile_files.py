"""Checkpoints made to do harm by what their files are: pickles, links, pipes, lists that name other files.
Nothing of them is run or waited for."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.checkpoints import verify
from megamoe.apps.checkpoints.describe import integrity_of
from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import INDEX, META, SUMS
from megamoe.checkpoint.format.folder import candidates, find_checkpoints
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.errors import UserError
from tests.support.checkpoint_files import seal
from tests.support.hostile import SHARD, assert_refused, read_all

pytestmark = pytest.mark.usefixtures("patience")


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("name", [META, INDEX, SHARD, SUMS])
@pytest.mark.parametrize("sealed", [True, False])
def test_nothing_is_unpickled(folder: Path, tmp_path: Path, name: str, sealed: bool) -> None:
    marker = tmp_path / "marker"
    torch.save(Bomb(marker), folder / name)
    if sealed and name != SUMS:
        seal(folder)
    assert_refused(folder)
    assert not marker.exists()
    os.replace(folder / name, tmp_path / "bomb.pt")
    torch.load(tmp_path / "bomb.pt", weights_only=False)
    assert marker.exists(), "it is no bomb"


def linked(folder: Path, name: str) -> None:
    outside = folder.parent.parent / "outside"
    os.replace(folder / name, outside)
    (folder / name).symlink_to(outside)


def piped(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def device(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")


def a_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


@pytest.mark.parametrize("put", [linked, piped, device, a_folder])
@pytest.mark.parametrize("name", [META, INDEX, SHARD, SUMS])
def test_what_is_no_plain_file_is_refused_unread(folder: Path, put: Any, name: str) -> None:
    put(folder, name)
    assert "not a plain file" in assert_refused(folder) or put is a_folder
    with pytest.raises(UserError), CheckpointReader(folder) as reader:  # whoever has asked for no checksums
        for tensor in reader.names():
            reader.tensor(tensor)
        assert name == SUMS
        raise UserError("the list is not read")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0" * 64 + "  ../../outside.json", "expected lines"),
        ("0" * 64 + "  /etc/passwd", "expected lines"),
        ("0" * 64 + "  ..", "expected lines"),
        ("0" * 64 + "  a\x1b.json", "expected lines"),
        ("0" * 64 + "  more.json", "more.json: missing"),
        ("0" * 64 + f"  {META}", "each file once"),
        ("", "expected lines"),
    ],
)
def test_the_list_names_files_of_the_folder_alone(folder: Path, line: str, message: str) -> None:
    (folder.parent.parent / "outside.json").write_text("{}")
    lines = [*(folder / SUMS).read_text().splitlines(), line]
    (folder / SUMS).write_text("".join(f"{it}\n" for it in sorted(lines, key=lambda it: it[66:])))
    assert message in assert_refused(folder)


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", b"\xff\n".decode(errors="surrogateescape")])
def test_what_is_not_in_the_list(folder: Path, name: str) -> None:
    (folder / name).touch()
    assert f"not in {SUMS}" in assert_refused(folder)


@pytest.mark.parametrize("name", [META, INDEX, SUMS])
def test_a_file_larger_than_any(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)  # of holes
    with pytest.raises(UserError, match="larger than 1,073,741,824 bytes"):
        if name == SUMS:
            raise UserError(next(files.problems(folder, shares=0)))
        CheckpointReader(folder)


def test_a_folder_that_is_a_link_is_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert list(verify.problems(tmp_path / "link")) == []
    read_all(tmp_path / "link")


def test_what_killed_saves_and_hands_left_in_a_run(folder: Path) -> None:
    """`latest` as a pipe, steps that are links in a circle, files and pipes."""
    run = folder.parent
    os.mkfifo(run / "latest")
    (run / "step_00000008").symlink_to("step_00000008")
    (run / "step_00000009").touch()
    os.mkfifo(run / "step_00000010")
    assert candidates(run) == [folder]
    assert [integrity_of(path) == "intact" for path in find_checkpoints(run)[0]] == [True] + [False] * 3
