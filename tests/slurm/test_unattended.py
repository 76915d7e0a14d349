"""A run of 300 steps on two nodes that meets every fault, and ends by itself as if there had been none."""

import json
from pathlib import Path

import pytest

from megamoe.apps.cluster.status import read_status
from tests.slurm import faulty_run
from tests.slurm.cluster import Cluster, logs_of, losses, undisturbed

pytestmark = pytest.mark.full

STEPS, EVERY = 300, 20
LINKS = 6
RUN = (
    f"train.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "train.hang_minutes=0.5",
    "train.callbacks=[faulty_run]",
    "plugins=[faulty_run.py]",
)


def taken(home: Path) -> dict[str, list[int]]:
    """Return the steps that each job began."""
    found: dict[str, list[int]] = {}
    path = home / faulty_run.TAKEN
    for line in path.read_text().splitlines() if path.exists() else []:
        job, step = line.split()
        found.setdefault(job, []).append(int(step))
    return found


def maintain(cluster: Cluster, home: Path, jobs: list[str]) -> Path:
    """Drain a node as an administrator does; return the checkpoint with which the run left it, now damaged.

    The job goes on; it is told to leave by scancel, and the next waits until the node is back.
    """

    def drained_job() -> list[str]:
        return [job for job, steps in taken(home).items() if steps[-1] >= faulty_run.DRAINED_AT]

    cluster.wait(lambda: bool(drained_job()), f"step {faulty_run.DRAINED_AT}", 900)
    (job,) = drained_job()
    cluster.call("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    (home / "drained").touch()
    cluster.wait(lambda: taken(home)[job][-1] > faulty_run.DRAINED_AT + 10, "a step on a draining node")
    cluster.call("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED"
    run = home / "runs/small"
    cluster.wait(lambda: read_status(run).verdict == "stopped", "the save")
    report = read_status(run)
    assert report.checkpoint == f"step_{taken(home)[job][-1]:08d}", "a drain loses no step"
    waiting = jobs[jobs.index(job) + 1]
    cluster.wait(lambda: "DRAINED" in cluster.call("squeue", "-h", "-j", waiting, "-o", "%T %r"), "the wait")
    newest = run / "checkpoints" / report.checkpoint
    flip_a_byte(max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size))
    cluster.call("scontrol", "update", "nodename=n2", "state=resume")
    return newest


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_that_meets_every_fault_ends_by_itself(cluster: Cluster, home: Path) -> None:
    """A rank is killed, a rank hangs, a node is drained, the newest checkpoint is damaged, a loss is NaN."""
    (home / "faulty_run.py").write_text(Path(faulty_run.__file__).read_text())
    jobs = cluster.chain(home, LINKS, *RUN)
    damaged = maintain(cluster, home, jobs)
    assert {cluster.wait_for_end(job, 900) for job in jobs[4:]} == {"COMPLETED"}, logs_of(home)
    run, by_job = home / "runs/small", taken(home)
    report = read_status(run)
    assert (report.verdict, report.skipped_steps) == ("finished", 1)

    # Four jobs took steps. Each but the first went back by at most one interval.
    assert list(by_job) == jobs[:4]
    lasts, firsts = [by_job[job][-1] for job in jobs[:3]], [by_job[job][0] for job in jobs[1:4]]
    assert lasts[0] == faulty_run.KILLED_AT
    # The watchdog wakes the stopped rank for its stacks, and it may take steps before it is killed.
    assert faulty_run.HANGS_AT <= lasts[1] < faulty_run.DRAINED_AT
    lost = [last - first + 1 for last, first in zip(lasts, firsts, strict=True)]
    assert all(0 < steps <= EVERY for steps in lost), (lasts, firsts)
    assert f"damaged: {damaged.relative_to(home)}" in str(logs_of(home))
    launches = [json.loads(line) for line in (run / "launches.jsonl").read_text().splitlines()]
    assert [launch["from_step"] + 1 for launch in launches[1:]] == firsts

    expected = undisturbed(home, *RUN)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert losses(run) == expected
