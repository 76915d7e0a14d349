"""Ends a launch that hangs, and shows where: one rank that stands still stops the progress of all.

On each rank a thread looks at the time of the last `tick()`. When that is too long ago
- every rank whose thread can still run writes the stacks of its threads into a file: it has answered;
- of each machine, the first local rank that answered has the others' stacks written by a signal, which works
  even for a process that was stopped or that holds the interpreter's lock; it prints all of them and kills
  those that were silent;
- all end with ExitCode.HANG.
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

FOLDER = "stacks"
POLL_S = 1.0
GRACE_S = 5.0  # for the other ranks to notice too
DUMP_S = 2.0  # for the signal's handler to write
HEADING = "no progress for"
PRINTING_S = 15.0  # the longest that a rank waits for the one that prints


@dataclass(frozen=True)
class Member:
    """A rank, its process, and the file for its stacks."""

    rank: int
    process: Process
    file: str

    def answered(self) -> bool:
        """Whether its watchdog wrote into its file; a signal, which anybody may send, writes no heading."""
        with suppress(OSError):
            return HEADING in Path(self.file).read_text(errors="replace")
        return False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process.host}, pid {self.process.pid})"


class Watchdog:
    """Watches from its entry to its exit, where it removes the file of this rank if that is empty.

    Collective when made: the ranks tell each other who they are.
    """

    def __init__(self, run_folder: Path, rank: int, hang_minutes: float) -> None:
        """hang_minutes: without progress, until it ends the run; 0: never."""
        self.limit_s = 60 * hang_minutes
        self._stop = threading.Event()
        self._fired = threading.Event()
        self._file, self._path = _open(run_folder, rank)
        self._me = Member(rank, Process.of(os.getpid()), str(self._path))
        everybody = gather_from_ranks(self._me)
        self._local = [m for m in everybody if m.process.machine == self._me.process.machine]
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
        tick()
        if self.limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if (
            self._fired.is_set()
        ):  # peers were killed, and this rank's work failed of it: not what is to be told
            time.sleep(4 * PRINTING_S)
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()
        with suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()
            self._path.parent.rmdir()  # by the last of the ranks

    def _watch(self) -> None:
        poll_s = min(POLL_S, self.limit_s / 10)
        looked = time.monotonic()
        while not self._stop.wait(poll_s):
            if time.monotonic() - looked > 5 * poll_s + 5:
                tick()  # this process was stopped, with the whole job perhaps, and goes on
            looked = time.monotonic()
            silent_s = silence_s()
            # Ranks wait for each other, so their last ticks are up to a micro batch apart.
            if silent_s > self.limit_s or (silent_s > self.limit_s / 2 and self._another_answered()):
                self._fired.set()
                self._fire(silent_s)

    def _another_answered(self) -> bool:
        return any(member.answered() for member in self._local if member != self._me)

    def _fire(self, silent_s: float) -> None:
        with suppress(OSError):  # a full disk
            self._file.write(f"{HEADING} {silent_s:.0f} s, after {ticks()} signs of it\n")
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        time.sleep(GRACE_S)
        answered = [member for member in self._local if member.answered()]
        silent = [member for member in self._local if member not in answered]
        for member in answered:
            if member == self._me:
                self._report(silent)
                break
            if _ends(member.process):
                break
            silent.append(member)  # it has answered and then stopped
        os._exit(ExitCode.HANG)

    def _report(self, silent: list[Member]) -> None:
        """Have the silent ranks' stacks written, end these ranks, print everybody's stacks."""
        for member in silent:
            _ask_for_stacks(member.process)
            _signal(member.process, signal.SIGCONT)
            _wait_for_the_end_of(member.file)
            _signal(member.process, signal.SIGKILL)  # before it gets on with its work
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
    """This rank's file, empty; in a temporary folder where the run's folder cannot be written."""
    name = f"rank_{rank:05d}.txt"
    try:
        folder = run_folder / FOLDER
        folder.mkdir(exist_ok=True)
        return (folder / name).open("w"), folder / name
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="megamoe_stacks_"))
        return (folder / name).open("w"), folder / name


def _read(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace") or "(no stack: it did not even answer a signal)\n"
    except OSError as error:
        return f"({error.strerror})\n"


def _ask_for_stacks(process: Process) -> None:
    """By the main thread, which takes the signal before it goes on; any other would after it has gone on."""
    try:
        ctypes.CDLL(None).tgkill(process.pid, process.pid, int(signal.SIGUSR2))
    except AttributeError:  # another C library
        _signal(process, signal.SIGUSR2)


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(OSError):
        if process.is_alive():
            os.kill(process.pid, number)


def _wait_for_the_end_of(file: str) -> None:
    """Until something was written into it and nothing more comes."""
    until, size, before = time.monotonic() + DUMP_S, 0, -1
    while time.monotonic() < until and (size == 0 or size != before):
        time.sleep(0.1)
        with suppress(OSError):
            size, before = os.path.getsize(file), size


def _ends(process: Process) -> bool:
    """Whether it does, when it has printed everything."""
    until = time.monotonic() + PRINTING_S
    while process.is_alive() and time.monotonic() < until:
        time.sleep(0.1)
    return not process.is_alive()
