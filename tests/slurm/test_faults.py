"""Faults of nodes and of the user, on two nodes: a clear line within a minute, never a hang."""

import socket
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, logs_of

pytestmark = pytest.mark.full

BUSY_S = 240.0  # a minute on an idle machine; with other work on its cores the imports alone take minutes
# One task per node, without torchrun: srun gives the ranks.
DIRECT = """#!/usr/bin/env bash
export MASTER_ADDR=${ADDRESS:-127.0.0.1} MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000)) OMP_NUM_THREADS=1
srun --kill-on-bad-exit=0 --output=direct-%t.out bash -c "$COMMAND"
"""
PRETRAIN = ".venv/bin/python pretrain_gpt_moe.py --config run.yaml train.callbacks=[] "
PREFLIGHT = ".venv/bin/python tools/preflight.py --config run.yaml "


def direct(
    cluster: Cluster, home: Path, command: str, *options: str, **variables: str
) -> tuple[str, str, float]:
    """Run a command on both nodes; return the job's state, the outputs, and its seconds."""
    job = submit_direct(cluster, home, command, *options, **variables)
    started = time.monotonic()
    state = cluster.wait_for_end(job)
    return state, outputs(home), time.monotonic() - started


def submit_direct(cluster: Cluster, home: Path, command: str, *options: str, **variables: str) -> str:
    (home / "direct.sbatch").write_text(DIRECT)
    options = ("--parsable", "--nodes=2", "--output=direct.out", *options)
    script = str(home / "direct.sbatch")
    return cluster.call("sbatch", *cluster.options(home), *options, script, COMMAND=command, **variables)


def outputs(home: Path) -> str:
    """Return what both tasks printed."""
    return "".join(path.read_text() for path in sorted(home.glob("direct-*.out")))


def test_preflight_finds_two_nodes_well(cluster: Cluster, home: Path) -> None:
    state, text, seconds = direct(cluster, home, PREFLIGHT)
    assert state == "COMPLETED", text
    assert "n1-n2: all-reduce " in text and "preflight: 2 of 2 nodes are well" in text
    assert seconds < BUSY_S


@pytest.mark.parametrize(
    ("options", "problem"), [("ro", "Read-only file system"), ("size=512k", "No space left on device")]
)
def test_a_bad_disk_of_one_node_is_told_before_training(
    options: str, problem: str, cluster: Cluster, home: Path
) -> None:
    """The job ends before the ranks start, with what to pass to --exclude."""
    (home / "runs").mkdir()
    with cluster.disk("n2", home / "runs", options):
        job = cluster.submit(home, "pretrain.sbatch", "run.yaml", PREFLIGHT="1")
        assert cluster.wait_for_end(job, BUSY_S) == "FAILED"
    log = logs_of(home)[f"slurm-megamoe-{job}.out"]
    assert f"bad node n2: output disk {home / 'runs'}: {problem}; free some space" in log
    assert "\nexclude: n2\n" in log
    assert not any("node-" in name for name in logs_of(home))


def test_a_read_only_disk_of_one_node_without_preflight(cluster: Cluster, home: Path) -> None:
    (home / "runs").mkdir()
    with cluster.disk("n2", home / "runs", "ro"):
        state, text, seconds = direct(cluster, home, PRETRAIN)
    assert state == "FAILED" and seconds < BUSY_S
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert lines and "Traceback" not in text, text
    assert any("rank 1" in line or "n2" in line or "Read-only" in line for line in lines), text


@pytest.mark.parametrize("command", [PRETRAIN, PREFLIGHT])
def test_a_master_that_does_not_resolve(command: str, cluster: Cluster, home: Path) -> None:
    state, text, seconds = direct(cluster, home, command, ADDRESS="no-such-node.invalid")
    assert state == "FAILED" and seconds < BUSY_S
    assert "MASTER_ADDR: 'no-such-node.invalid' does not resolve on" in text
    assert "Traceback" not in text


def test_a_port_in_use(cluster: Cluster, home: Path) -> None:
    job = submit_direct(cluster, home, PRETRAIN, "--hold")
    with socket.create_server(("", 15000 + int(job) % 15000)):
        cluster.call("scontrol", "release", job)
        state = cluster.wait_for_end(job, BUSY_S)
    text = outputs(home)
    assert state == "FAILED"
    assert f"MASTER_PORT: {15000 + int(job) % 15000} is in use on" in text and "Traceback" not in text


def test_a_node_that_does_not_start_is_named(cluster: Cluster, home: Path) -> None:
    """Its process never comes; preflight does not wait longer than half a minute."""
    command = f'[ "$SLURM_PROCID" = 1 ] || exec {PREFLIGHT}'
    state, text, seconds = direct(cluster, home, command)
    assert state == "FAILED" and seconds < BUSY_S
    assert "bad node n2: did not report within 25 s" in text and "exclude: n2" in text


def test_nodes_that_disagree(cluster: Cluster, home: Path) -> None:
    other = "optimizer.lr=0.$((SLURM_PROCID + 1))"
    state, text, _ = direct(cluster, home, PRETRAIN + other)
    assert state == "FAILED"
    assert "optimizer.lr: 0.1 on rank 0, 0.2 on rank 1; start all ranks with the same configuration" in text
    state, text, _ = direct(cluster, home, PREFLIGHT + other)
    assert "bad node n2: optimizer.lr is 0.2, on most nodes 0.1" in text
