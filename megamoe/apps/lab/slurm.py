"""Submits a study to Slurm: a job array of the tuning, one of the runs, and a job that makes the page.

An array has a job for each chain: a training run and the stages that need only it. The last job calls the lab
itself, which runs what is missing (such as stages over all seeds) and writes the page.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from megamoe.apps.lab.plan import Plan
from megamoe.apps.lab.tasks import planned_tasks, tuning_tasks
from megamoe.errors import UserError
from megamoe.io import replace_file

SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name=megamoe-lab
#SBATCH --output={logs}/slurm-%x-%A_%a.out
cd {folder}
exec {command}
"""


def submit(plan: Plan, output: Path, options: str, arguments: list[str], of_last: list[str]) -> None:
    """Write the batch scripts and submit them, each after the one before has ended.

    options: of sbatch, such as `--partition=gpu --time=4:00:00`. arguments: of the lab. of_last: further ones
    of the last job, which makes the page.

    Raises:
        UserError: if there is no sbatch, or it refuses a script.
    """
    tuning = tuning_tasks(plan, output)[0].chains()
    chains = planned_tasks(plan, output).chains()
    before = ""
    if tuning:
        before = _submit(output, "tuning", options, [*arguments, "--phase", "tuning"], len(tuning), before)
    before = _submit(output, "study", options, [*arguments, "--phase", "study"], len(chains), before)
    last = _submit(output, "page", options, [*arguments, *of_last], None, before)
    print(f"submitted; the page is written by job {last}: {output / 'page'}")


def _submit(
    output: Path, name: str, options: str, arguments: list[str], chains: int | None, before: str
) -> str:
    """Submit a script; return the number of its job."""
    logs = output / "slurm"
    logs.mkdir(exist_ok=True)
    command = shlex.join([sys.executable, "-m", "megamoe.cli", "lab", *arguments])
    given = ["sbatch", "--parsable", *shlex.split(options)]
    if chains is not None:
        command += ' --chain "$SLURM_ARRAY_TASK_ID"'
        given.append(f"--array=0-{chains - 1}")
    if before:
        given.append(f"--dependency=afterany:{before}")
    script = logs / f"{name}.sbatch"
    text = SCRIPT.format(logs=shlex.quote(str(logs)), folder=shlex.quote(os.getcwd()), command=command)
    replace_file(script, text.encode())
    try:
        done = subprocess.run([*given, str(script)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(
            f"--slurm: sbatch cannot be called: {error.strerror}; is Slurm installed here?"
        ) from None
    if done.returncode:
        raise UserError(f"--slurm: sbatch refuses {script}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout.strip().partition(";")[0]
