"""Faults of nodes and of the user, on two nodes: a clear line within a minute, never a hang.

The minute begins with the job, or with the fault if the job runs already. It includes the imports.
"""

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, logs_of, make_home, steps_done

pytestmark = pytest.mark.full

LINE_S = 60.0
END_S = 150.0  # from the line to the job's end: the run's parallel.timeout_minutes is 1
# One task per node, without torchrun: srun gives the ranks.
DIRECT = """#!/usr/bin/env bash
export MASTER_ADDR=${ADDRESS:-127.0.0.1} MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000)) OMP_NUM_THREADS=1
srun --kill-on-bad-exit=0 --output=logs/direct/%t.out bash -c "$COMMAND"
"""
PRETRAIN = ".venv/bin/python pretrain_gpt_moe.py --config run.yaml train.callbacks=[] "
ONE_RANK = ("run.yaml", "parallel.expert=1", "train.steps=3")
PREFLIGHT = ".venv/bin/python tools/preflight.py --config run.yaml "


def submit_direct(cluster: Cluster, home: Path, command: str, *options: str, **variables: str) -> str:
    """Submit a command that runs once on each node; return the job's id."""
    (home / "direct.sbatch").write_text(DIRECT)
    (home / "logs/direct").mkdir(parents=True)
    options = ("--parsable", "--nodes=2", "--output=direct.out", *options)
    script = str(home / "direct.sbatch")
    return cluster.call("sbatch", *cluster.options(home), *options, script, COMMAND=command, **variables)


def told(cluster: Cluster, home: Path, job: str, *lines: str, code: str = "FAILED") -> str:
    """Wait for the lines within a minute of the job's start, and for its end; return the job's output."""
    cluster.wait(lambda: cluster.state(job) != "PENDING", "the start of the job")
    started = time.monotonic()

    def output() -> str:
        return "\n".join(logs_of(home).values())

    within(LINE_S, lambda: all(line in output() for line in lines), output)
    seconds = time.monotonic() - started
    assert cluster.wait_for_end(job, END_S) == code, output()
    print(f"{lines[0]!r} after {seconds:.0f} s, the end after {time.monotonic() - started:.0f} s")
    assert "Traceback" not in re.sub(r"(?m)^E\d{4} .*(\n.*)*?ChildFailedError.*", "", output()), output()
    return output()


def within(seconds: float, condition: Callable[[], bool], output: Callable[[], str]) -> None:
    """Wait for a condition, without a command that would take time from the job."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds:.0f} s:\n{output()}"
        time.sleep(0.2)


def test_preflight_finds_two_nodes_well(cluster: Cluster, home: Path) -> None:
    job = submit_direct(cluster, home, PREFLIGHT)
    told(cluster, home, job, "preflight: 2 of 2 nodes are well", "n1-n2: all-reduce ", code="COMPLETED")


@pytest.mark.parametrize(
    ("options", "problem"), [("ro", "Read-only file system"), ("size=512k", "No space left on device")]
)
def test_a_bad_disk_of_one_node_is_told_before_training(
    options: str, problem: str, cluster: Cluster, home: Path
) -> None:
    """The job ends before the ranks start, with what to pass to --exclude."""
    (home / "runs").mkdir()
    line = f"bad node n2: output disk {home / 'runs'}: {problem}; free some space"
    with cluster.disk("n2", home / "runs", options):
        job = cluster.submit(home, "pretrain.sbatch", "run.yaml", PREFLIGHT="1")
        told(cluster, home, job, line, "\nexclude: n2\n")
    assert not any("node-" in name for name in logs_of(home))


def test_a_job_goes_on_without_its_bad_node(cluster: Cluster, home: Path) -> None:
    (home / "runs").mkdir()
    with cluster.disk("n1", home / "runs", "ro"):
        variables = {"PREFLIGHT": "1", "STEP_S": "0"}
        job = cluster.submit(home, "pretrain.sbatch", *ONE_RANK, options=("--nodes=1",), **variables)
        assert cluster.wait_for_end(job) == "COMPLETED", logs_of(home)
    told_by_script = logs_of(home)[f"slurm-megamoe-{job}.out"]
    assert "bad node n1: output disk" in told_by_script
    assert f"job {job}: without n1 from now on" in told_by_script
    assert steps_done(home / "runs/small") == 3
    assert "ExcNodeList=n1" in cluster.call("scontrol", "show", "job", job)


def test_a_chain_goes_on_without_its_bad_node(cluster: Cluster, home: Path) -> None:
    (home / "runs").mkdir()
    with cluster.disk("n1", home / "runs", "ro"):
        jobs = cluster.chain(home, 3, *ONE_RANK[1:], options=("--nodes=1",), PREFLIGHT="1")
        assert [cluster.wait_for_end(job) for job in jobs] == ["FAILED", "COMPLETED", "COMPLETED"]
    assert steps_done(home / "runs/small") == 3
    assert "the run is complete" in logs_of(home)[f"slurm-megamoe-{jobs[2]}.out"]


def test_preflight_names_a_node_with_a_low_limit_a_wrong_clock_and_a_full_local_disk(
    cluster: Cluster, home: Path
) -> None:
    for name in ("clock", "local"):
        (home / name).mkdir()
    (home / "clock/sitecustomize.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() + 15"
    )
    on_n2 = 'if [ "$SLURM_PROCID" = 1 ]; then export PYTHONPATH=clock; ulimit -n 512; fi; '
    with cluster.disk("n2", home / "local", "size=64m"):
        command = f"{on_n2} TMPDIR=$PWD/local {PREFLIGHT} --rounds 0"
        told(
            cluster,
            home,
            submit_direct(cluster, home, command),
            "bad node n2: ulimit -n is 512, expected at least 1024",
            "bad node n2: its clock is +1",
            f"bad node n2: local disk {home / 'local'}: 0.1 GiB free, expected 1.0 GiB for compiled kernels",
            "\nexclude: n2\n",
        )


def test_preflight_names_a_node_that_does_not_share_the_output(cluster: Cluster, home: Path) -> None:
    (home / "runs").mkdir()
    with cluster.disk("n2", home / "runs", "size=64m"):
        job = submit_direct(cluster, home, PREFLIGHT)
        line = (
            f"bad node n2: output {home / 'runs'}: does not show a file of the first node; share the folder"
        )
        told(cluster, home, job, line, "\nexclude: n2\n")


def test_a_read_only_disk_of_one_node_without_preflight(cluster: Cluster, home: Path) -> None:
    (home / "runs").mkdir()
    with cluster.disk("n2", home / "runs", "ro"):
        job = submit_direct(cluster, home, PRETRAIN + "checkpoint.every=1")
        told(cluster, home, job, "error: checkpoint: rank 1 cannot write in ", "Read-only file system")


def test_a_disk_that_fills_up_on_the_node_of_both_ranks(cluster: Cluster, home: Path) -> None:
    (home / "runs").mkdir()
    more = "train.steps=1000 checkpoint.every=1 checkpoint.keep=1000"
    with cluster.disk("n2", home / "runs", "size=8m"):
        options = ("--nodelist=n2", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2")
        job = submit_direct(cluster, home, PRETRAIN + more, *options)
        told(cluster, home, job, "error: ", "No space left on device")


@pytest.mark.parametrize("command", [PRETRAIN, PREFLIGHT])
def test_a_master_that_does_not_resolve(command: str, cluster: Cluster, home: Path) -> None:
    job = submit_direct(cluster, home, command, ADDRESS="no-such-node.invalid")
    told(cluster, home, job, "MASTER_ADDR: 'no-such-node.invalid' does not resolve on")


@pytest.mark.parametrize("command", [PRETRAIN, PREFLIGHT])
def test_a_master_that_cannot_be_reached(command: str, cluster: Cluster, home: Path) -> None:
    """An address of TEST-NET-1 (RFC 5737), at which nothing answers."""
    job = submit_direct(cluster, home, command, ADDRESS="192.0.2.1")
    told(cluster, home, job, "192.0.2.1:")


@pytest.mark.parametrize("command", [PRETRAIN, PREFLIGHT])
def test_a_port_in_use(command: str, cluster: Cluster, home: Path) -> None:
    """By a program that accepts connections and never answers."""
    job = submit_direct(cluster, home, command, "--hold")
    port = 15000 + int(job) % 15000
    with socket.create_server(("", port)):
        cluster.call("scontrol", "release", job)
        told(cluster, home, job, f"MASTER_PORT: {port}")


def test_a_port_in_use_under_torchrun(cluster: Cluster, home: Path) -> None:
    options = ("--hold",)
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml", options=options, PREFLIGHT="1")
    port = 15000 + int(job) % 15000
    with socket.create_server(("", port)):
        cluster.call("scontrol", "release", job)
        told(cluster, home, job, f"MASTER_PORT: {port}")


def test_a_node_that_does_not_start_is_named(cluster: Cluster, home: Path) -> None:
    """Its process never comes; preflight does not wait longer than half a minute."""
    job = submit_direct(cluster, home, f'[ "$SLURM_PROCID" = 1 ] || exec {PREFLIGHT}')
    told(cluster, home, job, "bad node n2: did not report within 25 s", "exclude: n2")


def test_a_node_that_does_not_start_is_named_without_preflight(cluster: Cluster, home: Path) -> None:
    job = submit_direct(cluster, home, f'[ "$SLURM_PROCID" = 0 ] || exec {PRETRAIN}')
    told(cluster, home, job, "rank 1 (", "has waited 30 s for rank 0 at 127.0.0.1:")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (PRETRAIN, "optimizer.lr: 0.1 on rank 0, 0.2 on rank 1; start all ranks with the same configuration"),
        (PREFLIGHT, "bad node n2: optimizer.lr is 0.2, on most nodes 0.1"),
    ],
)
def test_nodes_with_other_configurations(command: str, line: str, cluster: Cluster, home: Path) -> None:
    told(cluster, home, submit_direct(cluster, home, f"{command} optimizer.lr=0.$((SLURM_PROCID + 1))"), line)


@pytest.mark.parametrize(
    ("command", "line"),
    [(PRETRAIN, "run the same code on all machines"), (PREFLIGHT, "bad node n2: plugin plugin.py: ")],
)
def test_nodes_with_other_code(command: str, line: str, cluster: Cluster, home: Path) -> None:
    for rank in (0, 1):
        with (make_home(home / f"node_{rank}") / "plugin.py").open("a") as file:
            file.write(f"MORE = {rank}\n")
    told(cluster, home, submit_direct(cluster, home, f"cd node_$SLURM_PROCID; {command}"), line)


def test_a_node_that_dies(cluster: Cluster, home: Path) -> None:
    job = submit_direct(cluster, home, PRETRAIN + "train.steps=100000", "--no-requeue")
    cluster.wait(lambda: steps_done(home / "runs/small") >= 3, "three steps")
    cluster.node("kill", "n2")
    try:
        told(cluster, home, job, "lost contact with another rank", code="NODE_FAIL")
    finally:
        cluster.node("revive", "n2")
