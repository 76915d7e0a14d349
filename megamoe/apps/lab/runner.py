"""Runs the tasks of a study that are not complete, as processes side by side, and keeps a record of each.

A record (tasks/<name>.json) says what a task was started with, and how it ended. A complete task is never
repeated. A training run that was interrupted goes on with its last checkpoint. While a process runs, it
holds a lock on its task, which the kernel takes back however it ends.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megamoe.apps.command import LAUNCHER
from megamoe.apps.lab.tasks import Task
from megamoe.compat.glibc import signal_at_parents_end
from megamoe.errors import ExitCode, UserError
from megamoe.io import (
    METRICS_FILE,
    SUMMARY_FILE,
    open_plain,
    parse_json,
    read_json,
    reason,
    replace_file,
)
from megamoe.metrics.formats import format_duration

LARGEST_RECORD = 1 << 20  # bytes
POLL_S, PROGRESS_S, WAIT_S = 0.1, 30.0, 60.0
STAGE_STEPS = 20  # of training, as which a stage counts until one has ended
STARTED, DONE, STOPPED, FAILED = "started", "done", "stopped", "failed"
MOST_TAIL = 1 << 16  # bytes at the end of a task's output that are searched for its error


@dataclass(frozen=True)
class TaskRecord:
    """What is known of a task. state: started, done, stopped (before its end, as planned or by a signal; the
    next call goes on with it) or failed. seconds: of its last process. memory: the largest resident set of
    one of its processes, in bytes. problem: why it is not done, in a line.
    """

    identity: str
    state: str
    seconds: float = 0.0
    memory: int = 0
    problem: str = ""


@dataclass
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    since: float
    slot: str | None
    lock: int


class Runner:
    """Tasks of one study's folder.

    slots: one for each process that may run at the same time; text: the GPUs that it sees, None: no choice.
    report: called with each line of progress. ranks: of each run, which share the cores of a slot.
    """

    def __init__(
        self, output: Path, slots: list[str | None], report: Callable[[str], None], ranks: int = 1
    ) -> None:
        self.folder = output / "tasks"
        self.slots = slots
        self.report = report
        self.threads = max(1, len(os.sched_getaffinity(0)) // (len(slots) * ranks))
        self.pace = Pace([])

    def record(self, task: Task) -> TaskRecord | None:
        """Return what is known of a task, None if it was never started.

        Raises:
            UserError: if the task was started with another configuration, or its record is broken.
        """
        path = self.folder / f"{task.name}.json"
        if not path.exists():
            return None
        try:
            found = TaskRecord(**read_json(path, LARGEST_RECORD))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: {reason(error)}; delete it, and the task is run again") from None
        if found.identity != task.identity:
            again = "begin anew with --overwrite"
            if task.configuration is None:  # a stage, which costs less than the runs beside it
                again = f"delete it and {task.folder}, and the stage is run again"
            raise UserError(
                f"{path}: {task.name} was started with another configuration; name another folder with "
                f"--output, or {again}"
            )
        return found

    def is_done(self, task: Task) -> bool:
        """Whether the task is complete."""
        found = self.record(task)
        return found is not None and found.state == DONE

    def has_ended(self, task: Task) -> bool:
        """Whether the task is done or has failed; one that was interrupted or stopped goes on."""
        found = self.record(task)
        return found is not None and found.state in (DONE, FAILED)

    def was_started(self, task: Task) -> bool:
        """Whether the task has a record, of whatever identity."""
        return (self.folder / f"{task.name}.json").exists()

    def problem_of(self, task: Task) -> str:
        """Return why a task is not complete, in a line; empty if it is."""
        found = self.record(task)
        if found is not None and found.state == DONE:
            return ""
        return (found.problem if found is not None else "") or "not complete"

    def run(self, tasks: Iterable[Task], after: int = 0) -> None:
        """Run all tasks that are not complete, each after those that it needs.

        What needs a task that failed or stopped fails too. A process that a signal ended is started once
        more. after: the steps of later calls, which the time left includes.
        """
        tasks = [*tasks]
        waiting = [task for task in tasks if not self.is_done(task)]
        self.pace = Pace(waiting, after, len(self.slots))
        for known in tasks:
            if self.is_done(known):
                self.pace.know(known, self.record_of(known).seconds)
        self.folder.mkdir(parents=True, exist_ok=True)
        total, running, tried = len(waiting), list[_Running](), set[str]()
        failed: set[str] = set()
        free = list(self.slots)
        told = time.monotonic()
        try:
            while waiting or running:
                self._drop_blocked(waiting, failed)
                while free and (task := self._next(waiting, running)) is not None:
                    waiting.remove(task)
                    if (started := self._start(task, free[0])) is not None:
                        running.append(started)
                        free.pop(0)
                time.sleep(POLL_S)
                for each in [it for it in running if self._ended(it)]:
                    running.remove(each)
                    free.append(each.slot)
                    record = self.record_of(each.task)
                    self.pace.ended(each.task, record.state == DONE, record.seconds)
                    if each.process.returncode < 0 and each.task.name not in tried:
                        tried.add(each.task.name)
                        waiting.insert(0, each.task)
                        self.report(
                            f"{each.task.name}: ended by signal {-each.process.returncode}; once more"
                        )
                    elif record.state != DONE:
                        failed.add(each.task.name)
                    self.report(self._progress(total, waiting, running))
                    told = time.monotonic()
                if running and time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    self.report(self._progress(total, waiting, running))
        finally:
            for each in running:
                each.process.send_signal(signal.SIGTERM)
            for each in running:
                each.process.wait()
                os.close(each.lock)

    def record_of(self, task: Task) -> TaskRecord:
        """Return the record of a task that was started."""
        found = self.record(task)
        assert found is not None
        return found

    def _next(self, waiting: list[Task], running: list[_Running]) -> Task | None:
        open_names = {task.name for task in waiting} | {each.task.name for each in running}
        return next((task for task in waiting if not open_names & set(task.needs)), None)

    def _drop_blocked(self, waiting: list[Task], failed: set[str]) -> None:
        for task in [task for task in waiting if failed & set(task.needs)]:
            waiting.remove(task)
            failed.add(task.name)
            missing = ", ".join(sorted(failed & set(task.needs)))
            self._write(task, TaskRecord(task.identity, FAILED, problem=f"{missing} is not complete"))

    def _start(self, task: Task, slot: str | None) -> _Running | None:
        """Start a task's process; None if another lab, such as a job of an array, has completed it by now."""
        lock = locked(self.folder / f"{task.name}.lock")
        if self.is_done(task):
            os.close(lock)
            return None
        task.folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = list(task.arguments)
        if task.configuration is not None:
            path, text = task.configuration
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
        else:
            task.folder.mkdir(exist_ok=True)
        if task.checkpoints_of is not None:
            arguments += [str(path) for path in sorted(task.checkpoints_of.glob("checkpoints/step_*"))]
        self._write(task, TaskRecord(task.identity, STARTED))
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        if slot is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot
        with (self.folder / f"{task.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[lock],
                preexec_fn=_end_with_parent,
            )
        return _Running(task, process, time.monotonic(), slot, lock)

    def _ended(self, each: _Running) -> bool:
        """Whether the process has ended; then its record is written."""
        pid, status, usage = os.wait4(each.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        each.process.returncode = code = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - each.since
        state, problem = _outcome(each.task, code, self.folder / f"{each.task.name}.log")
        self._write(each.task, TaskRecord(each.task.identity, state, seconds, usage.ru_maxrss << 10, problem))
        os.close(each.lock)
        return True

    def _write(self, task: Task, record: TaskRecord) -> None:
        content: dict[str, Any] = asdict(record)
        replace_file(self.folder / f"{task.name}.json", json.dumps(content, indent=1).encode(), synced=True)

    def _progress(self, total: int, waiting: list[Task], running: list[_Running]) -> str:
        """Return a line: what runs and how far it is, and the time left at the pace so far."""
        steps = [(each.task, _last_step(each.task.folder / METRICS_FILE)) for each in running]
        past = time.monotonic() - self.pace.begun
        seconds = self.pace.seconds_left(past, waiting, steps)
        left = "" if seconds is None else f", about {format_duration(seconds)} left"
        names = ", ".join(
            f"{task.name} step {step:,} of {task.steps:,}" if task.steps else task.name
            for task, step in steps
        )
        done = total - len(waiting) - len(running)
        return f"{done} of {total} tasks, {format_duration(past)}{left}" + (f": {names}" if names else "")


class Pace:
    """The time left: steps at the pace of this call, and each stage as long as the mean of those before it.

    after: the steps of later calls. slots: processes at a time. begun: when this call began, of the monotonic
    clock. Steps that an earlier call has trained and saved count neither as done nor as left. A stage, or a
    run of epochs, of which none is complete yet, counts as STAGE_STEPS steps.
    """

    def __init__(self, tasks: Iterable[Task], after: int = 0, slots: int = 1) -> None:
        self.begun = time.monotonic()
        self._after, self._slots = after, slots
        self._saved = {task.name: _saved_step(task) for task in tasks}
        self._done = 0
        self._seconds: dict[Path, list[float]] = {}  # of complete tasks without a number of steps
        self._in_stages = 0.0  # seconds of this call's processes

    def know(self, task: Task, seconds: float) -> None:
        """A task is complete, and its process took so long."""
        if not task.steps:
            self._seconds.setdefault(task.folder.parent, []).append(seconds)

    def ended(self, task: Task, whole: bool, seconds: float = 0.0) -> None:
        """A task's process has ended, after so long; whole: with success."""
        if whole and not task.steps:
            self.know(task, seconds)
            self._in_stages += seconds
            return
        step = task.steps if whole else _last_step(task.folder / METRICS_FILE)
        self._done += max(0, min(step, steps_of(task)) - self._saved[task.name])
        self._saved[task.name] = _saved_step(task)

    def seconds_left(
        self, past: float, waiting: Iterable[Task], running: Iterable[tuple[Task, int]]
    ) -> float | None:
        """Return the seconds left; None if too little is done for a guess.

        past: seconds since the beginning. running: tasks with the steps that they are at.
        """
        done, left, in_stages = self._done, self._after, 0.0
        for task, step in [*((task, 0) for task in waiting), *running]:
            if known := self._seconds.get(task.folder.parent) if not task.steps else None:
                in_stages += fmean(known)
                continue
            saved = self._saved[task.name]
            done += max(0, min(step, steps_of(task)) - saved)
            left += max(0, steps_of(task) - max(step, saved))
        if left and done < STAGE_STEPS:
            return None
        of_steps = max(0.0, past - self._in_stages / self._slots) / done * left if left else 0.0
        return of_steps + in_stages / self._slots


def steps_of(task: Task) -> int:
    """Return what a task counts as for the time left: its steps; few for one without a number of steps."""
    return task.steps or STAGE_STEPS


def _saved_step(task: Task) -> int:
    """Return the step of a run's last checkpoint, from which it goes on; 0 without any."""
    names = (path.name.partition("_")[2] for path in task.folder.glob("checkpoints/step_*"))
    return max((int(name) for name in names if name.isdecimal()), default=0) if task.steps else 0


def _last_step(path: Path) -> int:
    """Return the step of the last whole record; 0 without any. One of many experts is longer than a tail."""
    try:
        with open_plain(path) as file:
            size, tail = os.fstat(file.fileno()).st_size, MOST_TAIL
            while True:
                file.seek(max(0, size - tail))
                for line in reversed(file.read().splitlines()):
                    if (step := _step_in(line)) is not None:
                        return step
                if tail >= size:
                    return 0
                tail *= 4
    except OSError:
        return 0


def _step_in(line: bytes) -> int | None:
    """Return the step of a record; None of a line that is cut off."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _outcome(task: Task, code: int, log: Path) -> tuple[str, str]:
    """Return the state of a task whose process ended with this code, and why it is not done.

    A run that `train.exit_after_*` has stopped ends with 0 too.
    """
    step, steps = _last_step(task.folder / METRICS_FILE), task.steps or _steps_in(task.folder / SUMMARY_FILE)
    if code == 0 and step >= steps:
        return DONE, ""
    if code not in (0, ExitCode.STOPPED):
        return FAILED, _problem(log, code)
    place = f" at step {step:,} of {steps:,}" if steps else ""
    return STOPPED, f"stopped{place}; the same command goes on with it"


def _steps_in(summary: Path) -> int:
    """Return the steps of a run by its summary, for one of epochs; 0 of a stage, which has none."""
    try:
        return int(read_json(summary, LARGEST_RECORD)["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _problem(log: Path, code: int) -> str:
    """Return the last line of a task's output that tells of an error, else how it ended."""
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    try:
        with open_plain(log) as file:
            file.seek(max(0, log.stat().st_size - MOST_TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ended
    told = [line.strip() for line in lines if "error" in line.lower()]
    return f"{told[-1][:300]} ({ended})" if told else f"{ended}; see {log}"


def _end_with_parent() -> None:
    signal_at_parents_end(signal.SIGTERM)


def locked(path: Path) -> int:
    """Return an open file with a lock that the process inherits.

    Raises:
        UserError: if a process of an earlier call still holds it after a minute.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() > until:
                os.close(handle)
                raise UserError(f"{path}: the task is running elsewhere; wait for it, or end it") from None
            time.sleep(POLL_S)
