"""Processes of a section: ranks of this machine, and runs of pretrain_gpt_moe.py."""

import json
import os
import re
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.child import ROOT, launched
from gpu.findings import Machine
from megamoe.metrics.reader import whole_lines

SHOWN_LINES = 8  # of a failed process's error output; the whole is in the folder of logs
# Every process that this command starts has it in its environment, with the names of those that started it.
MARK = "MEGAMOE_GPU_CHECK"
# A line by which torch's launcher begins its report of ranks that ended, and the last line of a traceback.
OF_LAUNCHER = re.compile(r"torch/distributed/elastic/\S+\] (Sending process|failed \(exitcode)")
AN_ERROR = re.compile(r"[\w.]+(Error|Exception): ")
KILLS = 20  # rounds: a process may start another one while it is ended


class Failed(Exception):
    """A process ended with an error; the message has the end of what it printed."""


def run_process(
    command: Sequence[str], variables: Mapping[str, str], log: Path, timeout_s: float
) -> tuple[int | None, str]:
    """Run a command; return its exit code, None if it was not finished in time, and what it printed.

    Its error output goes to `log`, all of it. What it has started ends with it, whatever session or parent it
    has: a launcher's ranks are no longer its children when it is killed.
    """
    mark = f"{variables.get(MARK, '')}/{uuid.uuid4().hex}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**variables, MARK: mark}, stdout=printed, stderr=errors
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all(mark)
            process.wait()
        printed.seek(0)
        return code, printed.read()


def end_all(mark: str) -> None:
    """Kill every process that was started under this mark."""
    for _ in range(KILLS):
        found = marked(mark)
        for number in found:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not found:
            return


def marked(mark: str) -> list[int]:
    """Return the numbers of the running processes under a mark, without this one."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = any(
                each.startswith(wanted) for each in (folder / "environ").read_bytes().split(b"\0")
            )
        except OSError:  # it has ended, or is another user's
            continue
        if is_marked and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def last_lines(log: Path, lines: int = SHOWN_LINES) -> str:
    """Return the first error and the end of an error output as one line, with the name of its file.

    Not the report of torch's launcher, which comes after the ranks' own lines and does not say what happened.
    """
    text = log.read_text(errors="replace").strip().splitlines()
    reported = next((place for place, line in enumerate(text) if OF_LAUNCHER.search(line)), len(text))
    own = text[:reported] or text
    end = own[-lines:]
    error = next((line for line in own if AN_ERROR.match(line)), None)
    first = f"{error[:500]} | " if error is not None and error not in end else ""
    return f"{first}{' | '.join(end)[-1000:]} (all of it: {log.name})"


def start(
    machine: Machine, ranks: int, command: Sequence[str], timeout_s: float, accepted: Sequence[int] = (0,)
) -> str:
    """Run a Python command on so many ranks of this machine; return what it printed.

    accepted: the exit codes that are no error.

    Raises:
        Failed: if it ended with an error, or not in time.
    """
    python, variables = launched(ranks)
    if machine.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    log = machine.next_log(Path(command[0]).stem)
    code, printed = run_process([*python, *command], variables, log, timeout_s)
    if code is None:
        raise Failed(f"not finished after {timeout_s:.0f} s; {last_lines(log)}")
    if code not in accepted:
        raise Failed(last_lines(log))
    return printed


def train(
    machine: Machine, ranks: int, config: str, overrides: Sequence[str], timeout_s: float = 240
) -> list[dict[str, Any]]:
    """Train with that configuration; return the records of metrics.jsonl that have a training loss.

    Raises:
        Failed: as `start`.
    """
    with tempfile.TemporaryDirectory() as output:
        settings = [f"output={output}", "name=run", "log.report=false", *overrides]
        start(machine, ranks, ["pretrain_gpt_moe.py", "--config", config, *settings], timeout_s)
        lines = whole_lines(Path(output, "run", "metrics.jsonl"))
        return [line.record for line in lines if "train/lm_loss" in line.record]


def on_ranks(machine: Machine, ranks: int, section: str, arguments: dict[str, Any], timeout_s: float) -> Any:
    """Run a section's own `on_rank` on so many ranks; return what rank 0 gave."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        given = json.dumps({"device": machine.device, "quick": machine.quick, **arguments})
        command = ["benchmarks/gpu_check.py", "--on-rank", section, "--given", given, "--json", file.name]
        start(machine, ranks, command, timeout_s)
        return json.load(file)
