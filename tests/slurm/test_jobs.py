"""What can happen to a job: a node dies, the time limit, scancel, an array, a chain of jobs."""

import json
from pathlib import Path

import pytest

from megamoe.apps.cluster.status import read_status
from tests.slurm.cluster import Cluster, Losses, logs_of, losses, steps_done

pytestmark = pytest.mark.full


def test_a_node_that_dies_ends_the_ranks_and_the_job_starts_again(
    cluster: Cluster, home: Path, expected: Losses
) -> None:
    run = home / "runs/small"
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml")
    cluster.wait(lambda: steps_done(run) >= 7, "seven steps")
    cluster.node("kill", "n2")
    cluster.wait(lambda: "lost contact" in str(logs_of(home)), "the line of the other rank", 60)
    cluster.wait(lambda: cluster.state(job) == "PENDING", "the job in the queue again", 120)
    cluster.node("revive", "n2")
    assert cluster.wait_for_end(job) == "COMPLETED", logs_of(home)
    assert losses(run) == expected
    assert len((run / "launches.jsonl").read_text().splitlines()) == 2


def test_the_time_limit(cluster: Cluster, home: Path, expected: Losses) -> None:
    """Slurm itself warns, up to a minute before the time that --signal names."""
    run = home / "runs/small"
    options = ("--time=3", "--signal=B:USR1@60")
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml", options=options, STEP_S="4")
    assert cluster.wait_for_end(job, 420) == "COMPLETED", logs_of(home)
    assert losses(run) == expected
    assert "saved; back into the queue" in logs_of(home)[f"slurm-megamoe-{job}.out"]


def test_scancel_saves(cluster: Cluster, home: Path) -> None:
    """Slurm sends SIGTERM, and kills after KillWait."""
    run = home / "runs/small"
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml")
    cluster.wait(lambda: steps_done(run) >= 2, "two steps")
    cluster.call("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED"
    cluster.wait(lambda: read_status(run).verdict == "stopped", "the save", 60)
    report = read_status(run)
    assert "SIGTERM" in report.reason or "another rank received a signal" in report.reason
    assert report.checkpoint == f"step_{report.step:08d}"


def test_an_array_trains_a_run_for_each_line(cluster: Cluster, home: Path) -> None:
    (home / "study.txt").write_text(
        "run.yaml name=first parallel.expert=1 train.steps=3 seed=1\n"
        "run.yaml name=second parallel.expert=1 train.steps=3 seed=2\n"
    )
    job = cluster.submit(home, "array.sbatch", "study.txt", options=("--array=1-2",))
    for task in ("1", "2"):
        assert cluster.wait_for_end(f"{job}_{task}") == "COMPLETED", logs_of(home)
    assert losses(home / "runs/first") != losses(home / "runs/second")
    assert steps_done(home / "runs/first") == steps_done(home / "runs/second") == 3


def test_a_warning_to_a_task_of_an_array_stops_this_one_alone(cluster: Cluster, home: Path) -> None:
    """The last task has the job number of the whole array."""
    lines = [f"run.yaml name=task_{task} parallel.expert=1\n" for task in (1, 2)]
    (home / "study.txt").write_text("".join(lines))
    array = cluster.submit(home, "array.sbatch", "study.txt", options=("--array=1-2",))
    runs = {task: home / f"runs/task_{task}" for task in (1, 2)}
    cluster.wait(lambda: all(steps_done(run) >= 3 for run in runs.values()), "three steps of both")
    shown = cluster.call("scontrol", "--oneliner", "show", "job", array).splitlines()
    (last,) = [int(line.split("ArrayTaskId=")[1][0]) for line in shown if line.startswith(f"JobId={array} ")]
    cluster.call("scancel", "--batch", "--signal=USR1", f"{array}_{last}")
    for task, run in runs.items():
        assert cluster.wait_for_end(f"{array}_{task}") == "COMPLETED", logs_of(home)
        assert steps_done(run) == 40
        launches = [json.loads(line)["job"] for line in (run / "launches.jsonl").read_text().splitlines()]
        assert launches == [f"{array}_{task}.{start}" for start in range(2 if task == last else 1)]


def test_a_warning_before_training_is_told(cluster: Cluster, home: Path) -> None:
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml", PREFLIGHT="1")
    cluster.wait(lambda: any(home.glob("logs/*/preflight-*.out")), "the check of the nodes")
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait_for_end(job) == "FAILED"
    assert "error: the time limit is near before training" in logs_of(home)[f"slurm-megamoe-{job}.out"]
    assert not any("node-" in name for name in logs_of(home))


def test_one_node_with_a_task_for_each_rank(cluster: Cluster, home: Path) -> None:
    options = ("--ntasks-per-node=2",)
    variables = contained(home)
    job = cluster.submit(
        home, "one_node.sbatch", "run.yaml", "train.steps=3", options=options, PREFLIGHT="1", **variables
    )
    assert cluster.wait_for_end(job) == "COMPLETED", logs_of(home)
    assert steps_done(home / "runs/small") == 3
    assert {"rank-0.out", "rank-1.out"} <= {name.split("/")[-1] for name in logs_of(home)}
    assert "preflight: 1 of 1 nodes are well" in logs_of(home)[f"slurm-megamoe-{job}.out"]
    used = [line.split() for line in (home / "container.txt").read_text().splitlines()]
    assert {step for step, _ in used} == {"yes"}, "each process is in the container, by srun"
    programs = ("tools/status.py", "tools/preflight.py", "pretrain_gpt_moe.py")
    assert [sum(name == program for _, name in used) for program in programs] == [1, 1, 2]


def contained(home: Path) -> dict[str, str]:
    """Return the variables for a container, with a script in its place that notes what it starts."""
    (home / "container").write_text('echo "$IN_STEP $1" >> container.txt\nexec .venv/bin/python "$@"\n')
    return {"MEGAMOE_PYTHON": "bash container", "MEGAMOE_SRUN": "--export=ALL,IN_STEP=yes"}


def test_a_chain_with_progress_ends_when_the_run_is_complete(
    cluster: Cluster, home: Path, expected: Losses
) -> None:
    jobs = cluster.chain(home, 4, "train.exit_after_steps=20")
    assert [cluster.wait_for_end(job) for job in jobs] == 4 * ["COMPLETED"], logs_of(home)
    assert losses(home / "runs/small") == expected
    launches = (home / "runs/small/launches.jsonl").read_text().splitlines()
    assert len(launches) == 2
    for job in jobs[2:]:
        assert "the run is complete" in logs_of(home)[f"slurm-megamoe-{job}.out"]


def test_a_chain_without_progress_is_stopped(cluster: Cluster, home: Path) -> None:
    """The configuration crashes each time; only the first link tries."""
    jobs = cluster.chain(home, 3, CRASH="1")
    assert [cluster.wait_for_end(job) for job in jobs] == 3 * ["FAILED"]
    logs = logs_of(home)
    assert [any(name.startswith(f"logs/{job}.0/node") for name in logs) for job in jobs] == [
        True,
        False,
        False,
    ]
    for job in jobs[1:]:
        assert "saved no checkpoint (newest: none); not started again" in logs[f"slurm-megamoe-{job}.out"]


def test_a_chain_whose_checkpoints_are_damaged_is_stopped(cluster: Cluster, home: Path) -> None:
    """The second link tells, and the third does not start."""
    jobs = cluster.chain(home, 3, "train.exit_after_steps=10", DAMAGE="1")
    assert [cluster.wait_for_end(job) for job in jobs] == ["COMPLETED", "FAILED", "FAILED"]
    logs = logs_of(home)
    second = "".join(text for name, text in logs.items() if name.startswith(f"logs/{jobs[1]}.0"))
    assert "no intact checkpoint is left to go on from" in second
    assert not any(name.startswith(f"logs/{jobs[2]}.0/node") for name in logs)
    line = "saved no checkpoint (newest: step_00000010 "
    assert line in logs[f"slurm-megamoe-{jobs[2]}.out"]
    assert losses(home / "runs/small")[-1][0] == 10


def preempt(cluster: Cluster) -> None:
    """Submit a job to a partition with a higher priority, and wait for its end."""
    options = ("--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    assert cluster.wait_for_end(cluster.call("sbatch", *options, "--wrap=sleep 2")) == "COMPLETED"


def test_a_preempted_job_saves_and_goes_on_bit_for_bit(
    cluster: Cluster, home: Path, expected: Losses
) -> None:
    """Slurm sends SIGTERM to the ranks; the script, which outlives them, puts the job back."""
    run = home / "runs/small"
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml")
    cluster.wait(lambda: steps_done(run) >= 3, "three steps")
    preempt(cluster)
    assert steps_done(run) < 40 and cluster.wait_for_end(job) == "COMPLETED", logs_of(home)
    assert losses(run) == expected
    assert "preempted; back into the queue" in logs_of(home)[f"slurm-megamoe-{job}.out"]
    first, second = (json.loads(line) for line in (run / "launches.jsonl").read_text().splitlines())
    assert (first["job"], second["job"]) == (f"{job}.0", f"{job}.1")
    assert second["from_step"] >= 3, "the checkpoint that SIGTERM made"


def test_a_job_that_is_preempted_before_its_first_step_starts_again(cluster: Cluster, home: Path) -> None:
    """It has saved no checkpoint, but not by its own fault."""
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml")
    cluster.wait(lambda: any("node-" in name for name in logs_of(home)), "the start of the ranks")
    preempt(cluster)
    assert cluster.wait_for_end(job) == "COMPLETED", logs_of(home)
    assert losses(home / "runs/small")[-1][0] == 40


def test_one_process_of_an_allocation_of_several_tasks_trains_alone(cluster: Cluster, home: Path) -> None:
    """A batch script with --ntasks, and a step of one task in it; neither has MASTER_ADDR."""
    train = ".venv/bin/python pretrain_gpt_moe.py --config run.yaml train.callbacks=[] train.steps=2 "
    train += "parallel.expert=1"
    script = home / "alone.sbatch"
    script.write_text(f"#!/usr/bin/env bash\n{train} name=script && srun --ntasks=1 {train} name=step\n")
    options = (f"--chdir={home}", "--parsable", "--nodes=1", "--ntasks=4", "--mem=0", "--output=alone.out")
    job = cluster.call("sbatch", *options, str(script))
    assert cluster.wait_for_end(job) == "COMPLETED", (home / "alone.out").read_text()
    assert losses(home / "runs/script") == losses(home / "runs/step")
