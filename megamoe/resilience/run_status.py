"""Files in the run's folder that tell how the launch is, for `tools/status.py`.

heartbeat.json           written by rank 0 every `INTERVAL_S`, and at the end with the reason of the end
launches.jsonl           a line for each launch: its time, first step, host, and Slurm's job
failures/rank_00003.json the error that ended a rank, if it was that rank's own
environment/JOB.START.txt  a copy of the file that MEGAMOE_ENVIRONMENT names (examples/slurm/common.sh)
"""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from megamoe.errors import is_lost_contact
from megamoe.io import read_json, replace_file
from megamoe.resilience.error_reporting import explain
from megamoe.resilience.heartbeat import silence_s, tick

HEARTBEAT, LAUNCHES, FAILURES, ENVIRONMENT = "heartbeat.json", "launches.jsonl", "failures", "environment"
LARGEST_HEARTBEAT = 1 << 20
STACKS = "stacks"  # the watchdog's folder
INTERVAL_S = 10.0
State = Literal["running", "finished", "stopped", "failed"]


class RunStatus:
    """A context manager around the steps of a launch, on every rank. The run's folder must exist.

    An error of these files, such as a full disk, is ignored: training decides on its own files.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, step: Callable[[], int], steps: int) -> None:
        """step: returns the number of steps done so far; steps: the number of the last step."""
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._step, self._steps = step, steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run_status", daemon=True)
        self.reason: str | None = None  # why the launch stopped before its last step

    def __enter__(self) -> "RunStatus":
        tick()  # a start of more than a minute is no hang
        if self._rank == 0:
            with suppress(OSError):
                self._record_launch()
                self._copy_environment()
            self._write("running")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._rank == 0:
            self._thread.join(INTERVAL_S)
        if error is not None:
            self._record_failure(error)
        elif self._rank == 0:
            self._write("finished" if self.reason is None else "stopped", self.reason)

    def _beat(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._write("running")

    def _write(self, state: State, reason: str | None = None) -> None:
        beat = {
            "state": state,
            "reason": reason,
            "time": time.time(),
            "silence_s": silence_s(),
            "step": self._step(),
            "steps": self._steps,
            **_process(),
        }
        with suppress(OSError):
            replace_file(self._folder / HEARTBEAT, json.dumps(beat).encode())

    def _record_launch(self) -> None:
        launch = {"time": time.time(), "from_step": self._step(), "ranks": self._ranks, **_process()}
        with (self._folder / LAUNCHES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(launch) + "\n")

    def _copy_environment(self) -> None:
        source = os.environ.get("MEGAMOE_ENVIRONMENT")
        if source:
            folder = self._folder / ENVIRONMENT
            folder.mkdir(exist_ok=True)
            copy = folder / f"{_job() or 'launch'}.txt"
            copy.unlink(missing_ok=True)
            copy.touch(mode=0o600)  # the owner's alone, as the original
            shutil.copyfile(source, copy)

    def _record_failure(self, error: BaseException) -> None:
        line = explain(error)[1] or f"{type(error).__name__}: {' '.join(str(error).split())}"
        if self._rank == 0:
            self._write("failed", line)
        elif not is_lost_contact(error):
            failure = {"time": time.time(), "rank": self._rank, "reason": line, **_process()}
            with suppress(OSError):
                (self._folder / FAILURES).mkdir(exist_ok=True)
                path = self._folder / FAILURES / f"rank_{self._rank:05d}.json"
                replace_file(path, json.dumps(failure).encode())


def stopped_at(folder: Path) -> tuple[int, int] | None:
    """Return at which step the last launch was stopped, and the run's steps; None if it was not stopped."""
    try:
        beat = read_json(folder / HEARTBEAT, LARGEST_HEARTBEAT)
        return (int(beat["step"]), int(beat["steps"])) if beat["state"] == "stopped" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _process() -> dict[str, Any]:
    return {"host": host_name(), "pid": os.getpid(), "job": _job()}


def host_name() -> str:
    """Return the name of this host, as Slurm names it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _job() -> str | None:
    """Return Slurm's job and the number of its restarts, `1234.0` or `1234_5.0`; None without Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return None if job is None else f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
