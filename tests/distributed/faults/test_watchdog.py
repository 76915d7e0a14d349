"""A rank that hangs: the others find out, show where everybody is, and end the run."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megamoe.checkpoint.remote import RemoteFolder
from megamoe.errors import ExitCode
from megamoe.train import loop, saver
from megamoe.train.trainer import Trainer
from tests.support.ranks.entry_script import Fault, run_entry_script
from tests.support.ranks.pool import Pool

HANG = "train.hang_minutes=0.08"  # a busy machine takes seconds for a step


def stop_rank_0(trainer: Trainer) -> None:
    if trainer.progress.step == 3 and trainer.world.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_lock_on_rank_1(trainer: Trainer) -> None:
    """Hang in a C function that holds the interpreter lock, so that no Python thread runs."""
    if trainer.progress.step == 3 and trainer.world.rank == 1:
        ctypes.PyDLL(None).sleep(600)


def loop_on_rank_1(trainer: Trainer) -> None:
    while trainer.progress.step == 3 and trainer.world.rank == 1:
        pass


def wait_for_a_lock(trainer: Trainer) -> None:
    lock = threading.Lock()
    lock.acquire()
    if trainer.progress.step == 3 and trainer.world.rank == 0:
        lock.acquire()


def test_a_stopped_rank_is_named_shown_and_ended(pool: Pool, tmp_path: Path) -> None:
    """It is the one that would have ended the others; the next takes its place."""
    saves = ("checkpoint.every=2", "checkpoint.background=false")
    found = run_entry_script(pool, tmp_path, HANG, *saves, fault=stop_rank_0, ranks=3)
    assert found.codes == [-signal.SIGKILL, ExitCode.HANG, ExitCode.HANG]
    first, second, third = found.outputs
    assert "error: " not in first + third
    (line,) = (line for line in second.splitlines() if line.startswith("error: "))
    folder = tmp_path / "runs/a/stacks"
    assert line.startswith("error: rank 0 (")
    assert line.endswith(f"stopped or stuck; stacks of all ranks: {folder}")
    stacks = second.split("--- rank ")[1:]
    assert [stack[0] for stack in stacks] == ["0", "1", "2"]
    assert "in stop_rank_0" in stacks[0] and "did not answer" in stacks[0]
    assert "in all_reduce" in stacks[1] and "in all_reduce" in stacks[2]
    assert sorted(path.name for path in folder.iterdir()) == [f"rank_{rank:05d}.txt" for rank in range(3)]
    # Woken to show its stacks, it may have got some steps further before it was killed.
    assert (tmp_path / "runs/a/checkpoints/latest").read_text() >= "step_00000002"


def upload_slowly(trainer: Trainer) -> None:
    """Each file of a checkpoint takes longer to upload than ranks may be without progress."""
    put = RemoteFolder.put

    def slow(self: RemoteFolder, local: Path, *names: str) -> None:
        time.sleep(7 if names[0].startswith("step_") else 0)
        put(self, local, *names)

    if trainer.progress.step == 1:
        RemoteFolder.put = slow  # type: ignore[method-assign]


def upload_for_ever_and_stop(trainer: Trainer) -> None:
    if trainer.progress.step == 1:
        saver.UPLOAD_AFTER_SIGNAL_S, loop.MOST_REPORT_BYTES = 0.5, 0
        RemoteFolder.put = lambda *unused: time.sleep(600)  # type: ignore[method-assign]
    if trainer.progress.step == 2 and trainer.world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.full
def test_ranks_that_wait_for_an_upload_do_not_hang(pool: Pool, tmp_path: Path) -> None:
    remote = f"checkpoint.remote=file://{tmp_path}/storage"
    found = run_entry_script(pool, tmp_path, HANG, remote, fault=upload_slowly)
    assert found.codes == [ExitCode.FINISHED, ExitCode.FINISHED], found.outputs
    assert (tmp_path / "storage/a/latest").read_text().startswith("step_")


def test_after_a_signal_nobody_waits_for_a_long_upload_or_report(pool: Pool, tmp_path: Path) -> None:
    """A scheduler ends the job soon; the checkpoint is on the disk."""
    remote = f"checkpoint.remote=file://{tmp_path}/storage"
    found = run_entry_script(pool, tmp_path, remote, "log.report=true", fault=upload_for_ever_and_stop)
    assert found.codes == [ExitCode.STOPPED, ExitCode.STOPPED], found.outputs
    assert "is on the disk and not uploaded yet; --resume uploads it" in found.outputs[0]
    assert "report: not written, the run has a long record; python tools/report.py" in found.outputs[0]
    assert (tmp_path / "runs/a/checkpoints/latest").read_text().startswith("step_")
    assert not (tmp_path / "storage/a/latest").exists()


@pytest.mark.full
def test_a_rank_that_holds_the_interpreters_lock(pool: Pool, tmp_path: Path) -> None:
    found = run_entry_script(pool, tmp_path, HANG, fault=hold_the_lock_on_rank_1)
    assert found.codes == [ExitCode.HANG, -signal.SIGKILL]
    assert "error: rank 1 (" in found.outputs[0]
    assert "in hold_the_lock_on_rank_1" in found.outputs[0]


@pytest.mark.full
@pytest.mark.parametrize(("fault", "place"), [(loop_on_rank_1, "loop_on_"), (wait_for_a_lock, "for_a_lock")])
def test_a_hang_in_python_shows_in_the_stacks(pool: Pool, tmp_path: Path, fault: Fault, place: str) -> None:
    """Every watchdog runs, so nobody can be named; the stacks tell."""
    found = run_entry_script(pool, tmp_path, HANG, fault=fault)
    assert found.codes == [ExitCode.HANG, ExitCode.HANG]
    assert "made progress for 0.08 minutes (train.hang_minutes); all of them answered" in found.outputs[0]
    assert place in found.outputs[0]


def suspend_everybody(trainer: Trainer) -> None:
    """Both processes are stopped for longer than the limit, as by a scheduler that suspends the job."""
    if trainer.progress.step == 3:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(20)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.full
def test_a_suspended_job_continues(pool: Pool, tmp_path: Path) -> None:
    found = run_entry_script(pool, tmp_path, "train.hang_minutes=0.1", fault=suspend_everybody)
    assert found.codes == [ExitCode.FINISHED, ExitCode.FINISHED], found.outputs
