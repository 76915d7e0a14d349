"""Processes of a section: ranks of this machine, and runs of pretrain_gpt_moe.py."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.child import ROOT, launched
from gpu.findings import Machine
from megamoe.metrics.reader import whole_lines

SHOWN_LINES = 8  # of a failed process's error output


class Failed(Exception):
    """A process ended with an error; the message has the end of what it printed."""


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
    try:
        done = subprocess.run(
            [*python, *command],
            env=variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not finished after {timeout_s:.0f} s") from None
    if done.returncode not in accepted:
        raise Failed(" | ".join(done.stderr.strip().splitlines()[-SHOWN_LINES:])[-1500:])
    return done.stdout


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
        given = json.dumps({"device": machine.device, **arguments})
        command = ["benchmarks/gpu_check.py", "--on-rank", section, "--given", given, "--json", file.name]
        start(machine, ranks, command, timeout_s)
        return json.load(file)
