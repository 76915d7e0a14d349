"""A rank that crashes or finds that it cannot go on: all end at once, each with a line, and with a code."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.errors import ExitCode
from megamoe.train.trainer import Trainer
from tests.support.ranks.entry_script import run_entry_script
from tests.support.ranks.pool import Pool

LOADER = "data.workers=1"  # a loader process inherits its rank's connections
SAVES = ("checkpoint.every=2", "checkpoint.background=false")  # at once: it has published before the end


def kill_rank_1(trainer: Trainer) -> None:
    if trainer.progress.step == 3 and trainer.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fail_on_rank_1(trainer: Trainer) -> None:
    if trainer.progress.step == 3 and trainer.world.rank == 1:
        raise ZeroDivisionError("nobody expected it")


def kill_the_loader_of_rank_1(trainer: Trainer) -> None:
    if trainer.progress.step == 3:
        kill_each_loader_of_rank_1(trainer)


def kill_each_loader_of_rank_1(trainer: Trainer) -> None:
    if trainer.progress.step > 1 and trainer.world.rank == 1:
        stream: Any = trainer._stream
        (loader,) = stream._loader._iterators[0]._workers
        os.kill(loader.pid, signal.SIGKILL)
        time.sleep(0.3)


def test_a_killed_rank_ends_the_others_at_once(pool: Pool, tmp_path: Path) -> None:
    started = time.monotonic()
    found = run_entry_script(pool, tmp_path, LOADER, *SAVES, fault=kill_rank_1, ranks=3)
    assert time.monotonic() - started < 25  # and gloo's own limit is 30 minutes
    assert found.codes == [ExitCode.UNEXPECTED, -signal.SIGKILL, ExitCode.UNEXPECTED]
    for rank in (0, 2):
        (line,) = found.errors()[rank]
        assert line.startswith(f"error: rank {rank}: lost contact with another rank (")
    assert (tmp_path / "runs/a/checkpoints/latest").read_text() == "step_00000002"


def test_an_exception_has_its_traceback_on_its_rank_alone(pool: Pool, tmp_path: Path) -> None:
    found = run_entry_script(pool, tmp_path, LOADER, fault=fail_on_rank_1)
    assert found.codes == [ExitCode.UNEXPECTED, ExitCode.UNEXPECTED]
    other, own = found.errors()
    assert len(other) == 1 and other[0].startswith("error: rank 0: lost contact with another rank (")
    assert own[-1] == "[rank1]: ZeroDivisionError: nobody expected it"
    assert own[0] == "[rank1]: Traceback (most recent call last):"


def test_a_killed_loader_process_is_replaced(pool: Pool, tmp_path: Path) -> None:
    found = run_entry_script(pool, tmp_path, LOADER, fault=kill_the_loader_of_rank_1)
    assert found.codes == [0, 0]
    message = "warning: rank 1: a loader process died (data.workers), another goes on in its place: Data"
    assert message not in found.outputs[0] and found.outputs[1].count(message) == 1


@pytest.mark.full
def test_loader_processes_that_die_again_and_again_end_the_run(pool: Pool, tmp_path: Path) -> None:
    found = run_entry_script(pool, tmp_path, LOADER, fault=kill_each_loader_of_rank_1)
    assert found.codes == [ExitCode.UNEXPECTED, ExitCode.UNEXPECTED]
    (line,) = found.errors()[1]
    assert line.startswith("error: rank 1: a loader process died (data.workers): DataLoader worker (pid ")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of bytes: its path without an ending."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("to be or not to be, " * 4000)
    prepare(Preparation(str(folder / "train"), [str(folder / "text.txt")], progress=False))
    return folder / "train"


def shrink_the_data(trainer: Trainer) -> None:
    path = Path(trainer.config.data.sources[0].path + ".bin")
    if trainer.progress.step == 3 and trainer.world.rank == 1:
        os.truncate(path, path.stat().st_size // 2)


def replace_the_data(trainer: Trainer) -> None:
    path = Path(trainer.config.data.sources[0].path + ".bin")
    if trainer.progress.step == 3 and trainer.world.rank == 1:
        path.unlink()
        path.write_bytes(b"another")


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.full)])
def test_data_that_shrinks_ends_all_ranks_with_one_line(
    pool: Pool, tmp_path: Path, corpus: Path, workers: int
) -> None:
    shutil.copytree(corpus.parent, tmp_path / "data")
    size = (tmp_path / "data/train.bin").stat().st_size
    data = f"data={{mock: false, sources: [{tmp_path}/data/train], split: [1, 0, 0], workers: {workers}}}"
    arguments = [data, "model.vocab_size=null", "train.steps=400", "checkpoint.every=3"]
    found = run_entry_script(pool, tmp_path, *arguments, fault=shrink_the_data)
    assert found.codes == [ExitCode.MISTAKE, ExitCode.MISTAKE]
    expected = f"error: data: {tmp_path}/data/train.bin had {size} bytes and now has {size // 2}; prepare it "
    for lines in found.errors():  # of both, for no launcher has ended the second meanwhile
        assert len(lines) == 1 and lines[0].startswith(expected)
    assert (tmp_path / "runs/a/checkpoints/latest").is_file()


def test_damaged_data_ends_all_ranks_before_the_first_step(pool: Pool, tmp_path: Path, corpus: Path) -> None:
    """One flipped bit: the size is right, and so is every token id."""
    shutil.copytree(corpus.parent, tmp_path / "data")
    with (tmp_path / "data/train.bin").open("r+b") as file:
        file.seek(5000)
        file.write(b"u")  # of "to be or not to be"
    data = f"data={{mock: false, sources: [{tmp_path}/data/train], split: [1, 0, 0]}}"
    found = run_entry_script(pool, tmp_path, data, "model.vocab_size=null")
    assert found.codes == [ExitCode.MISTAKE, ExitCode.MISTAKE]
    for lines in found.errors():
        assert len(lines) == 1 and "/data/train.bin' is damaged or another dataset's: SHA-256" in lines[0]
    assert not (tmp_path / "runs/a/metrics.jsonl").exists()


@pytest.mark.full
def test_data_that_is_replaced_is_read_on(pool: Pool, tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(corpus.parent, tmp_path / "data")
    data = f"data={{mock: false, sources: [{tmp_path}/data/train], split: [1, 0, 0], workers: 0}}"
    found = run_entry_script(pool, tmp_path, data, "model.vocab_size=null", fault=replace_the_data)
    assert found.codes == [ExitCode.FINISHED, ExitCode.FINISHED], found.outputs


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB there."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def fill_the_disk(trainer: Trainer) -> None:
    if trainer.progress.step == 60 and trainer.world.rank == 0:
        fill(trainer.folder.path.parent)


@pytest.mark.full
def test_a_disk_that_fills_up_ends_the_run_with_a_line(pool: Pool, tmp_path: Path) -> None:
    """metrics.jsonl is written by the first rank alone; its last page holds some steps more."""
    arguments = ["checkpoint.every=60", "checkpoint.background=false", "train.steps=400", "data.workers=1"]
    with small_disk(tmp_path / "runs") as disk:
        found = run_entry_script(pool, tmp_path, *arguments, fault=fill_the_disk)
        assert found.codes == [ExitCode.MISTAKE, ExitCode.UNEXPECTED]
        first, second = found.errors()
        assert len(first) == len(second) == 1, found.outputs
        assert "No space left on device" in first[0] and "go on with --resume" in first[0]
        assert second[0].startswith("error: rank 1: lost contact with another rank (")
        assert (disk / "a/checkpoints/latest").is_file()


def read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("spoil", "message"), [(fill, "No space left on device"), (read_only, "Read-only file system")]
)
def test_an_unwritable_folder_is_reported_at_the_start(
    pool: Pool, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    with small_disk(tmp_path / "runs") as disk:
        spoil(disk)
        found = run_entry_script(pool, tmp_path, LOADER)
    assert found.codes == [ExitCode.MISTAKE, ExitCode.MISTAKE]
    for (line,) in found.errors():
        assert line == f"error: output: cannot write the run folder {disk}/a: {message}"


@pytest.mark.full
def test_a_file_in_the_outputs_place_is_reported_at_the_start(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    found = run_entry_script(pool, tmp_path)
    assert found.codes == [ExitCode.MISTAKE, ExitCode.MISTAKE]
    for (line,) in found.errors():
        assert line == f"error: output: cannot write the run folder {tmp_path}/runs/a: File exists"
