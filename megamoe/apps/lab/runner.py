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
from typing import Any

from megamoe.apps.lab.tasks import Task
from megamoe.compat.glibc import signal_at_parents_end
from megamoe.errors import UserError
from megamoe.io import read_plain, reason, replace_file
from megamoe.metrics.formats import format_duration

LARGEST_RECORD = 1 << 20  # bytes
POLL_S, PROGRESS_S, WAIT_S = 0.1, 30.0, 60.0
DONE = "done"
MOST_TAIL = 1 << 16  # bytes of a task's output that are searched for its error


@dataclass(frozen=True)
class TaskRecord:
    """What is known of a task. state: started, done or failed. seconds: of its last process. memory: the
    largest resident set of one of its processes, in bytes. problem: why it failed, in a line.
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
    report: called with each line of progress.
    """

    def __init__(self, output: Path, slots: list[str | None], report: Callable[[str], None]) -> None:
        self.folder = output / "tasks"
        self.slots = slots
        self.report = report
        self.begun = time.monotonic()

    def record(self, task: Task) -> TaskRecord | None:
        """Return what is known of a task, None if it was never started.

        Raises:
            UserError: if the task was started with another configuration, or its record is broken.
        """
        path = self.folder / f"{task.name}.json"
        if not path.exists():
            return None
        try:
            found = TaskRecord(**json.loads(read_plain(path, LARGEST_RECORD)))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: {reason(error)}; delete it, and the task is run again") from None
        if found.identity != task.identity:
            raise UserError(
                f"{path}: {task.name} was started with another configuration; name another folder with "
                "--output, or begin anew with --overwrite"
            )
        return found

    def is_done(self, task: Task) -> bool:
        """Whether the task is complete."""
        found = self.record(task)
        return found is not None and found.state == DONE

    def run(self, tasks: Iterable[Task]) -> None:
        """Run all tasks that are not complete, each after those that it needs.

        What needs a task that failed fails too. A process that a signal ended is started once more.
        """
        waiting = [task for task in tasks if not self.is_done(task)]
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
                    running.append(self._start(task, free.pop(0)))
                time.sleep(POLL_S)
                for each in [it for it in running if self._ended(it)]:
                    running.remove(each)
                    free.append(each.slot)
                    if each.process.returncode < 0 and each.task.name not in tried:
                        tried.add(each.task.name)
                        waiting.insert(0, each.task)
                        self.report(
                            f"{each.task.name}: ended by signal {-each.process.returncode}; once more"
                        )
                    elif self.record_of(each.task).state != DONE:
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
            self._write(task, TaskRecord(task.identity, "failed", problem=f"{missing} failed"))

    def _start(self, task: Task, slot: str | None) -> _Running:
        lock = _locked(self.folder / f"{task.name}.lock")
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
        self._write(task, TaskRecord(task.identity, "started"))
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(self.slots))))
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
        state = "failed" if code else DONE
        problem = _problem(self.folder / f"{each.task.name}.log", code) if code else ""
        self._write(each.task, TaskRecord(each.task.identity, state, seconds, usage.ru_maxrss << 10, problem))
        os.close(each.lock)
        return True

    def _write(self, task: Task, record: TaskRecord) -> None:
        content: dict[str, Any] = asdict(record)
        replace_file(self.folder / f"{task.name}.json", json.dumps(content, indent=1).encode(), synced=True)

    def _progress(self, total: int, waiting: list[Task], running: list[_Running]) -> str:
        """Return a line: what runs and how far it is, and the time left at the pace so far."""
        parts = [_share(each) for each in running]
        complete = total - len(waiting) - len(running) + sum(share for _, share in parts)
        past = time.monotonic() - self.begun
        left = (
            "" if complete < 0.05 else f", about {format_duration(past / complete * (total - complete))} left"
        )
        names = ", ".join(text for text, _ in parts)
        done = total - len(waiting) - len(running)
        return f"{done} of {total} tasks, {format_duration(past)}{left}" + (f": {names}" if names else "")


def _share(each: _Running) -> tuple[str, float]:
    """Return a running task's name with its step, and the share of it that is done."""
    if not each.task.steps:
        return each.task.name, 0.0
    step = _last_step(each.task.folder / "metrics.jsonl")
    return f"{each.task.name} step {step:,} of {each.task.steps:,}", min(1.0, step / each.task.steps)


def _last_step(path: Path) -> int:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_TAIL))
            lines = file.read().splitlines()
        for line in reversed(lines):
            if line.endswith(b"}"):
                return int(json.loads(line)["step"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0


def _problem(log: Path, code: int) -> str:
    """Return the last line of a task's output that tells of an error, else how it ended."""
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - MOST_TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ended
    told = [line.strip() for line in lines if "error" in line.lower()]
    return f"{told[-1][:300]} ({ended})" if told else f"{ended}; see {log}"


def _end_with_parent() -> None:
    signal_at_parents_end(signal.SIGTERM)


def _locked(path: Path) -> int:
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
