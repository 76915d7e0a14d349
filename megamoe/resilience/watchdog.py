"""A watchdog that ends a launch that hangs, and prints where it hangs.

One rank that hangs stops all ranks. On each rank a thread looks at the time of the last `tick()`. When that
is too long ago:

- Every rank whose thread can still run writes the stacks of its threads into a file. It has answered.
- On each machine, the first local rank that answered makes the silent ranks write their stacks, by a signal.
  That works even for a process that is stopped or that holds the GIL. It then kills the silent ranks, and
  prints all stacks.
- All ranks end with ExitCode.HANG.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megamoe.errors import ExitCode
from megamoe.parallel.consensus import gather_from_ranks
from megamoe.resilience.heartbeat import silence_s, tick, ticks
from megamoe.resilience.processes import Process
from megamoe.resilience.run_status import STACKS

POLL_S = 1.0
GRACE_S = 5.0  # for the other ranks to notice too
DUMP_S = 2.0  # for the signal handler to write
HEADING = "no progress for"
PRINTING_S = 15.0  # how long a rank waits for the rank that prints


@dataclass(frozen=True)
class Member:
    """A rank, with its process and the file of its stacks; stage: of the pipeline, None without one."""

    rank: int
    process: Process
    file: str
    stage: int | None = None

    def answered(self) -> bool:
        """Return whether its watchdog has written its stacks.

        After a signal the file has stacks without a heading.
        """
        with suppress(OSError):
            return HEADING in Path(self.file).read_text(errors="replace")
        return False

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"pipeline stage {self.stage}, "
        return f"rank {self.rank} ({stage}{self.process.host}, pid {self.process.pid})"


class Watchdog:
    """A context manager that watches while it is entered. On exit it removes this rank's file if it is empty.

    Making it is collective: the ranks exchange their processes' ids.
    """

    def __init__(self, run_folder: Path, rank: int, hang_minutes: float, stage: int | None = None) -> None:
        """hang_minutes: minutes without progress that end the run; 0: never. stage: this rank's."""
        self.limit_s = 60 * hang_minutes
        self._stop = threading.Event()
        self._fired = threading.Event()
        self._file, self._path = _open(run_folder, rank)
        self._me = Member(rank, Process.of(os.getpid()), str(self._path), stage)
        members = gather_from_ranks(self._me)
        self._local = [m for m in members if m.process.machine == self._me.process.machine]
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
        tick()
        if self.limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._fired.is_set():  # this rank failed because peers were killed: let the report come first
            time.sleep(4 * PRINTING_S)
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()
        with suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()
            self._path.parent.rmdir()  # by the last of the ranks

    def _watch(self) -> None:
        poll_s = min(POLL_S, self.limit_s / 10)
        last_poll = time.monotonic()
        while not self._stop.wait(poll_s):
            if time.monotonic() - last_poll > 5 * poll_s + 5:
                tick()  # this process was stopped, perhaps with the whole job, and now continues
            last_poll = time.monotonic()
            silent_s = silence_s()
            # Ranks wait for each other, so their last ticks are up to a micro batch apart.
            others = (member for member in self._local if member != self._me)
            if silent_s > self.limit_s or (silent_s > self.limit_s / 2 and any(m.answered() for m in others)):
                self._fired.set()
                self._fire(silent_s)

    def _fire(self, silent_s: float) -> None:
        with suppress(OSError):  # a full disk
            self._file.write(f"{HEADING} {silent_s:.0f} s, after {ticks()} heartbeats\n")
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        time.sleep(GRACE_S)
        answered = [member for member in self._local if member.answered()]
        silent = [member for member in self._local if member not in answered]
        for member in answered:
            if member == self._me:
                self._report(silent)
                break
            if _wait_for_end(member.process):
                break
            silent.append(member)  # it answered and hung after that
        os._exit(ExitCode.HANG)

    def _report(self, silent: list[Member]) -> None:
        """Make the silent ranks write their stacks, kill them, and print the stacks of all local ranks."""
        for member in silent:
            _ask_for_stacks(member.process)
            _signal(member.process, signal.SIGCONT)
            _wait_until_written(member.file)
            _signal(member.process, signal.SIGKILL)  # before it continues its work
        sys.stderr.write(self._message(silent))
        sys.stderr.flush()

    def _message(self, silent: list[Member]) -> str:
        minutes = f"{self.limit_s / 60:g} minutes (train.hang_minutes)"
        folder = Path(self._me.file).parent
        if silent:
            names = ", ".join(map(str, silent))
            line = f"{names} made no progress for {minutes} and did not answer: stopped or stuck"
        else:
            line = f"no rank of {self._me.process.host} made progress for {minutes}; all of them answered"
        text = f"error: {line}; stacks of all ranks: {folder}\n"
        for member in self._local:
            state = "did not answer" if member in silent else "answered"
            text += f"--- {member}: {state}\n{_read(member.file)}\n"
        return text


def _open(run_folder: Path, rank: int) -> tuple[IO[str], Path]:
    """Open this rank's empty file, in a temporary folder if the run's folder cannot be written."""
    name = f"rank_{rank:05d}.txt"
    try:
        folder = run_folder / STACKS
        folder.mkdir(exist_ok=True)
        return (folder / name).open("w"), folder / name
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="megamoe_stacks_"))
        return (folder / name).open("w"), folder / name


def _read(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace") or "(no stack: it did not answer the signal either)\n"
    except OSError as error:
        return f"({error.strerror})\n"


def _ask_for_stacks(process: Process) -> None:
    """Send SIGUSR2 to the main thread, which handles it before it continues. Another thread may be late."""
    try:
        ctypes.CDLL(None).tgkill(process.pid, process.pid, int(signal.SIGUSR2))
    except AttributeError:  # another C library
        _signal(process, signal.SIGUSR2)


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(OSError):
        if process.is_alive():
            os.kill(process.pid, number)


def _wait_until_written(file: str) -> None:
    """Wait until something has been written into the file and it no longer grows, at most DUMP_S."""
    until, size, before = time.monotonic() + DUMP_S, 0, -1
    while time.monotonic() < until and (size == 0 or size != before):
        time.sleep(0.1)
        with suppress(OSError):
            size, before = os.path.getsize(file), size


def _wait_for_end(process: Process) -> bool:
    """Wait for a process that prints, at most PRINTING_S; return whether it has ended."""
    until = time.monotonic() + PRINTING_S
    while process.is_alive() and time.monotonic() < until:
        time.sleep(0.1)
    return not process.is_alive()
