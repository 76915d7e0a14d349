"""Runs the tasks of a study that are not complete, as processes side by side, and keeps a record of each.

A record (tasks/<name>.json) says what a task was started with, and how it ended. A complete task is never
repeated. A training run that was interrupted goes on with its last checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megamoe.apps.command import LAUNCHER
from megamoe.apps.lab.tasks import Task
from megamoe.compat.glibc import signal_at_parents_end
from megamoe.errors import ExitCode, UserError
from megamoe.io import open_plain, read_json, reason, replace_file
from megamoe.metrics.formats import format_duration
from megamoe.resilience.run_status import HEARTBEAT, LARGEST_HEARTBEAT

LARGEST_RECORD = 1 << 20  # bytes
POLL_S, PROGRESS_S = 0.1, 30.0
STARTED, DONE, STOPPED, FAILED = "started", "done", "stopped", "failed"
MOST_TAIL = 1 << 16  # bytes at the end of a task's output that are searched for its error


@dataclass(frozen=True)
class TaskRecord:
    """What is known of a task.

    state: empty if it was never started; started, done, failed, or stopped (before its end, as planned or by
    a signal; the next call goes on with it). seconds: of its last process. memory: the largest resident set
    of one of its processes, in bytes. problem: why it is not done, in a line.
    """

    identity: str
    state: str = ""
    seconds: float = 0.0
    memory: int = 0
    problem: str = ""


@dataclass
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    since: float
    slot: str | None


class Runner:
    """Tasks of one study's folder.

    slots: one for each process that may run at the same time; text: the GPUs that it sees, None: no choice.
    report: called with each line of progress. ranks: of each run, which share the cores of a slot. launcher:
    the words before the command of each process. lock: an open file that each process inherits.
    """

    def __init__(
        self,
        output: Path,
        slots: list[str | None],
        report: Callable[[str], None],
        ranks: int = 1,
        launcher: Sequence[str] = (),
        lock: int | None = None,
    ) -> None:
        self.folder = output / "tasks"
        self.slots, self.report, self.launcher = slots, report, launcher
        self.threads = max(1, len(os.sched_getaffinity(0)) // (len(slots) * ranks))
        self.inherited = [] if lock is None else [lock]
        self.begun, self.total = 0.0, 0  # when `run` began, and its tasks

    def record(self, task: Task) -> TaskRecord:
        """Return what is known of a task.

        Raises:
            UserError: if the task was started with another configuration, or its record is broken.
        """
        path = self.folder / f"{task.name}.json"
        if not path.exists():
            return TaskRecord(task.identity)
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
        return self.record(task).state == DONE

    def problem_of(self, task: Task) -> str:
        """Return why a task is not complete, in a line; empty if it is."""
        return "" if self.is_done(task) else self.record(task).problem or "not complete"

    def run(self, tasks: Iterable[Task]) -> None:
        """Run all tasks that are not complete, each after those that it needs.

        What needs a task that failed or stopped fails too. A process that a signal ended is started once
        more.
        """
        waiting = [task for task in tasks if not self.is_done(task)]
        self.folder.mkdir(parents=True, exist_ok=True)
        running, tried, failed = list[_Running](), set[str](), set[str]()
        free = list(self.slots)
        told = self.begun = time.monotonic()
        self.total = len(waiting)
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
                    elif not self.is_done(each.task):
                        failed.add(each.task.name)
                    told = 0.0
                if (running and time.monotonic() - told > PROGRESS_S) or not told:
                    told = time.monotonic()
                    self.report(self._progress(waiting, [each.task for each in running]))
        finally:
            for each in running:
                each.process.send_signal(signal.SIGTERM)
            for each in running:
                each.process.wait()

    def _next(self, waiting: list[Task], running: list[_Running]) -> Task | None:
        if any(each.task.alone for each in running):
            return None
        open_names = {task.name for task in waiting} | {each.task.name for each in running}
        ready = (task for task in waiting if not open_names & set(task.needs))
        return next((task for task in ready if not (task.alone and running)), None)

    def _drop_blocked(self, waiting: list[Task], failed: set[str]) -> None:
        for task in [task for task in waiting if failed & set(task.needs)]:
            waiting.remove(task)
            failed.add(task.name)
            missing = ", ".join(sorted(failed & set(task.needs)))
            self._write(task, TaskRecord(task.identity, FAILED, problem=f"{missing} is not complete"))

    def _start(self, task: Task, slot: str | None) -> _Running:
        """Start a task's process."""
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
                [*self.launcher, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=self.inherited,
                preexec_fn=_end_with_parent,
            )
        return _Running(task, process, time.monotonic(), slot)

    def _ended(self, each: _Running) -> bool:
        """Whether the process has ended; then its record is written."""
        pid, status, usage = os.wait4(each.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        each.process.returncode = code = os.waitstatus_to_exitcode(status)
        seconds, memory = time.monotonic() - each.since, 0 if self.launcher else usage.ru_maxrss << 10
        state, problem = _outcome(each.task, code, self.folder / f"{each.task.name}.log")
        self._write(each.task, TaskRecord(each.task.identity, state, seconds, memory, problem))
        return True

    def _write(self, task: Task, record: TaskRecord) -> None:
        content = json.dumps(asdict(record), indent=1).encode()
        replace_file(self.folder / f"{task.name}.json", content, synced=True)

    def _progress(self, waiting: list[Task], running: list[Task]) -> str:
        """Return a line: how many tasks have ended, what runs and how far it is."""
        names = ", ".join(
            f"{task.name} step {_steps_of(task)[0]:,} of {task.steps:,}" if task.steps else task.name
            for task in running
        )
        ended = self.total - len(waiting) - len(running)
        told = f"{ended} of {self.total} tasks, {format_duration(time.monotonic() - self.begun)}"
        return told + (f": {names}" if names else "")


def _steps_of(task: Task) -> tuple[int, int]:
    """Return the steps that a run has done, by its heartbeat, and how many it has in all; 0 of a stage."""
    try:
        beat = read_json(task.folder / HEARTBEAT, LARGEST_HEARTBEAT)
        return int(beat["step"]), task.steps or int(beat["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, task.steps


def _outcome(task: Task, code: int, log: Path) -> tuple[str, str]:
    """Return the state of a task whose process ended with this code, and why it is not done.

    A run that `train.exit_after_*` has stopped ends with 0 too.
    """
    step, steps = _steps_of(task)
    if code == 0 and step >= steps:
        return DONE, ""
    if code not in (0, ExitCode.STOPPED):
        return FAILED, _problem(log, code)
    place = f" at step {step:,} of {steps:,}" if steps else ""
    return STOPPED, f"stopped{place}; the same command goes on with it"


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
