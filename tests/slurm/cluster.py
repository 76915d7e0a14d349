"""Submitting jobs to the cluster of cluster.sh, and waiting for what becomes of them."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/slurm/cluster.sh"
NOT_INSTALLED = 3
PATIENCE_S = 400.0  # a start of two ranks takes 10 s on an idle machine, and a minute on a busy one
Losses = list[tuple[int, float]]  # of each recorded step
LINKS = ("examples", "tools", "megamoe", "ds_configs", "pretrain_gpt_moe.py")
RUN = """
name: small
data: {mock: true, sequence_length: 16, workers: 0}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, vocab_size: 32}
moe: {layers: {every: 1}, num_experts: 4, router: {selector: {name: top_k, k: 2}}}
parallel: {expert: 2, timeout_minutes: 1}
train: {steps: 40, global_batch_size: 4, hang_minutes: 1, callbacks: [slow_first_start]}
evaluation: {batches: 0}
checkpoint: {every: 5}
log: {report: false, every: 1}
plugins: [plugin.py]
"""
# The first start of a job takes half a second a step, so that a signal meets it in the middle.
PLUGIN = """
import os, time
from megamoe.registry import register
from megamoe.train.callbacks import Callback

@register("callback", "slow_first_start")
class SlowFirstStart(Callback):
    '''Source: this test.'''
    def on_train_begin(self, trainer):
        if "CRASH" in os.environ:
            raise RuntimeError("planted")

    def on_step_begin(self, trainer):
        if "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            time.sleep(float(os.environ.get("STEP_S", "0.5")))

    def on_train_end(self, trainer):
        if "DAMAGE" in os.environ and trainer.world.is_first:
            for path in trainer.folder.path.glob("checkpoints/*/*.safetensors"):
                path.write_bytes(path.read_bytes()[:-1])
"""


def make_home(folder: Path) -> Path:
    """Return a folder with links to the repository's files, an environment, and the run of the tests."""
    folder.mkdir()
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "run.yaml").write_text(RUN)
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


def losses(run: Path) -> Losses:
    """Return step and loss of every record of a run."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["train/lm_loss"]) for record in records]


def steps_done(run: Path) -> int:
    """Return the last step that a run has recorded, 0 before the first."""
    try:
        return losses(run)[-1][0]
    except (OSError, IndexError, ValueError):
        return 0


def undisturbed(home: Path, *overrides: str) -> Losses:
    """Return the losses of the same run on two ranks of this machine, without Slurm."""
    drop = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["pretrain_gpt_moe.py", "--config", "run.yaml", "name=undisturbed", *overrides]
    environment["OMP_NUM_THREADS"] = "1"
    captured: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE_S}
    done = subprocess.run(command, cwd=home, env=environment, **captured)
    assert done.returncode == 0, done.stderr
    return losses(home / "runs/undisturbed")


@dataclass
class Cluster:
    """A running cluster, whose files are in a folder."""

    folder: Path

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator["Cluster"]:
        """Start a cluster, and stop it at the end."""
        done = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, timeout=60)
        if done.returncode == NOT_INSTALLED:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        try:
            yield cls(folder)
        finally:
            subprocess.run([SCRIPT, "stop", folder], check=True, timeout=60)

    def call(self, *command: str, **variables: str) -> str:
        """Run one of Slurm's commands; return what it prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: code {done.returncode}: {done.stdout} {done.stderr}"
        return done.stdout.strip()

    def options(self, home: Path) -> list[str]:
        """Return options of sbatch for nodes without GPUs and with few cores, and for the log's place."""
        return [f"--chdir={home}", "--gpus-per-node=0", "--cpus-per-task=1", "--ntasks-per-node=1", "--mem=0"]

    def submit(
        self, home: Path, script: str, *arguments: str, options: tuple[str, ...] = (), **variables: str
    ) -> str:
        """Submit a file of examples/slurm; return the job's id."""
        variables = {"MEGAMOE_HOME": str(home), "PREFLIGHT": "0", **variables}
        path = str(ROOT / "examples/slurm" / script)
        return self.call("sbatch", "--parsable", *self.options(home), *options, path, *arguments, **variables)

    def chain(
        self, home: Path, links: int, *arguments: str, options: tuple[str, ...] = (), **variables: str
    ) -> list[str]:
        """Submit a chain of jobs; return their ids."""
        command = [str(ROOT / "examples/slurm/chain.sh"), str(links), *self.options(home), *options, "--"]
        variables = {"MEGAMOE_HOME": str(home), "PREFLIGHT": "0", "STEP_S": "0", **variables}
        told = self.call(*command, "run.yaml", *arguments, **variables)
        return [line.split()[-1] for line in told.splitlines()]

    def state(self, job: str) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        found = re.search(r"JobState=(\w+)", self.call("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, (
                f"{what}: not within {seconds:.0f} s\n{self.call('squeue', '-l')}"
            )
            time.sleep(0.2)

    def wait_for_end(self, job: str, seconds: float = PATIENCE_S) -> str:
        """Wait for the end of a job; return its state."""
        self.wait(
            lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"),
            f"the end of job {job}",
            seconds,
        )
        return self.state(job)

    def node(self, verb: str, name: str) -> None:
        """Kill or revive a node."""
        subprocess.run([SCRIPT, verb, self.folder, name], check=True, timeout=60)

    @contextmanager
    def disk(self, name: str, path: Path, options: str) -> Iterator[None]:
        """Context in which a node has an empty disk of its own in place of a folder."""
        command: list[str | Path] = [SCRIPT, "disk", self.folder, name, path]
        done = subprocess.run([*command, options], capture_output=True, text=True, timeout=60)
        if done.returncode == NOT_INSTALLED:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        try:
            yield
        finally:
            subprocess.run([*command, "off"], timeout=60)


def logs_of(home: Path) -> Mapping[str, str]:
    """Return the logs of all jobs of a home, by their paths in it."""
    paths = [*home.glob("slurm-*.out"), *home.glob("logs/*/*.out")]
    return {str(path.relative_to(home)): path.read_text(errors="replace") for path in sorted(paths)}
