"""Pruning deletes the checkpoints that it names, and never one that a resume needs."""

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from megamoe.apps.checkpoints.prune import prune
from tests.support import checkpoint

Said = list[str]
LEFT = (
    ".saving_step_00000006",
    ".deleting_step_00000001",
    ".replaced_step_00000003",
    ".converting_x_0123abcd",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 5, a day apart, `latest` the last."""
    for step in range(1, 6):
        _write(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", step)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000005\n")
    return tmp_path / "run"


def _write(folder: Path, day: int) -> Path:
    checkpoint.write(folder, step=day)
    age(folder, 10 - day)
    return folder


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def damage(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step_{step:08d}" / "shard_00000.safetensors"
    times = (path.stat().st_atime, path.stat().st_mtime)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, times)


def pruned(run: Path, keep: int, damaged: bool = False, dry_run: bool = False) -> Said:
    output: Said = []
    prune(run, keep, damaged, dry_run, output.append)
    return output


def weight(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_the_newest_stay_and_deletions_are_reported(run: Path, place: str) -> None:
    folder = run / "checkpoints"
    sizes = {step: weight((folder / f"step_{step:08d}").iterdir()) for step in range(1, 6)}
    promised = pruned(run / place, 2, dry_run=True)
    assert steps(run) == [1, 2, 3, 4, 5]
    output = pruned(run / place, 2)
    assert steps(run) == [4, 5]
    assert [
        line.replace("would delete", "deleted").replace("would free", "freed") for line in promised
    ] == output
    assert output[0] == f"deleted {run / 'checkpoints' / 'step_00000001'} (old): {sizes[1]:,} bytes"
    assert output[-1].startswith(f"freed {sizes[1] + sizes[2] + sizes[3]:,} bytes")
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_00000004", "step_00000005"]
    assert pruned(run / place, 2) == ["freed 0 bytes (0.0 MB)"]


def test_what_latest_names_stays_and_so_does_the_newest(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step_00000002")
    pruned(run, 1)
    assert steps(run) == [2, 5]


def test_damaged_checkpoints_do_not_count_and_are_deleted_on_request(run: Path) -> None:
    damage(run, 5)
    damage(run, 4)
    damage(run, 1)
    output = pruned(run, 1)
    assert steps(run) == [1, 3, 4, 5]  # 3 is what a resume takes
    assert sum("; --damaged deletes it" in line for line in output) == 3
    pruned(run, 1, damaged=True)
    assert steps(run) == [3]


def test_the_last_intact_one_stays_though_it_is_the_oldest(run: Path) -> None:
    for step in (2, 3, 4, 5):
        damage(run, step)
    pruned(run, 1, damaged=True)
    assert steps(run) == [1]


def test_an_incomplete_folder_is_a_damaged_one(run: Path) -> None:
    (run / "checkpoints" / "step_00000009").mkdir()
    assert any("step_00000009: damaged" in line for line in pruned(run, 5))
    assert steps(run) == [1, 2, 3, 4, 5, 9]
    pruned(run, 5, damaged=True)
    assert steps(run) == [1, 2, 3, 4, 5]


def left(run: Path, name: str, days: float) -> Path:
    path = run / "checkpoints" / name
    shutil.copytree(run / "checkpoints" / "step_00000001", path)
    age(path, days)
    return path


@pytest.mark.parametrize("name", LEFT)
def test_what_killed_saves_left_goes_if_nobody_writes_it(run: Path, name: str) -> None:
    path = left(run, name, days=1)
    (path / "checkpoint.json").touch()  # a moment ago
    pruned(run, 5)
    assert path.exists()
    age(path, 0.9 / 24)
    pruned(run, 5)
    assert path.exists()
    age(path, 1.1 / 24)
    assert any("left by a save that was killed" in line for line in pruned(run, 5))
    assert not path.exists() and steps(run) == [1, 2, 3, 4, 5]
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.parametrize("state", ["gone", "damaged"])
def test_what_was_replaced_stays_while_its_successor_is_not_intact(run: Path, state: str) -> None:
    path = left(run, ".replaced_step_00000005", days=1)
    if state == "gone":
        shutil.rmtree(run / "checkpoints" / "step_00000005")
    else:
        damage(run, 5)
    pruned(run, 5, damaged=False)
    assert path.exists()


def test_links_are_left_alone(run: Path, tmp_path: Path) -> None:
    outside = _write(tmp_path / "outside", 1)
    (run / "checkpoints" / "step_00000000").symlink_to(outside)
    (run / "checkpoints" / ".saving_step_00000006").symlink_to(outside)
    output = pruned(run, 1, damaged=True)
    assert any(line.endswith("step_00000000: a link") for line in output)
    assert steps(run) == [0, 5] and len(list(outside.iterdir())) == 5


def test_renamed_ones_stay_and_do_not_count(run: Path) -> None:
    """By the user, or set aside by a fetch from object storage; a damaged one too."""
    folder = run / "checkpoints"
    names = ("step_00000001_best", "step_00000004.before-1", "step_00000005_best")
    for name in names:
        (folder / name[:13]).rename(folder / name)
    broken = folder / names[0] / "shard_00000.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    (folder / "latest").write_text("step_00000005_best")
    output = pruned(run, 1, damaged=True)
    assert sorted(path.name for path in folder.glob("step_*")) == sorted([*names, "step_00000003"])
    assert [line for line in output if line.startswith("kept")] == [
        f"kept {folder / name}: it was renamed" for name in names
    ]
