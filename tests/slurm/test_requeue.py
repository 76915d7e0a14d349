"""A run on two nodes of a real Slurm is stopped by its warning and goes on: what `.ci/run` has of Slurm."""

import json
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Losses, logs_of, losses, steps_done

pytestmark = pytest.mark.full


def test_a_warned_job_saves_goes_back_into_the_queue_and_goes_on_bit_for_bit(
    cluster: Cluster, home: Path, expected: Losses
) -> None:
    """SIGUSR1 to the batch script, which Slurm sends before the time limit (--signal=B:USR1)."""
    run = home / "runs/small"
    job = cluster.submit(home, "pretrain.sbatch", "run.yaml")
    cluster.wait(lambda: steps_done(run) >= 3, "three steps")
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait_for_end(job) == "COMPLETED", logs_of(home)
    assert losses(run) == expected
    log = logs_of(home)[f"slurm-megamoe-{job}.out"]
    assert log.count("saved; back into the queue") == 1
    first, second = (json.loads(line) for line in (run / "launches.jsonl").read_text().splitlines())
    assert (first["job"], second["job"]) == (f"{job}.0", f"{job}.1")
    assert 3 <= second["from_step"] < 40
    nodes = "".join(text for name, text in logs_of(home).items() if "/node-" in name)
    assert "\n[rank 0] saved runs/small/checkpoints/step_00000040\n" in nodes
    assert {name.split("/")[1] for name in logs_of(home) if name.startswith("logs/")} == {
        f"{job}.0",
        f"{job}.1",
    }
    assert f"job {job}, start 1, nodes n[1-2]" in (run / f"environment/{job}.1.txt").read_text()
