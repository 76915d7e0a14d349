"""The state of a run follows from the files in its folder."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.cluster.status import as_text, is_complete, newest_checkpoint, read_status
from megamoe.errors import UserError
from megamoe.resilience import heartbeat
from megamoe.resilience.run_status import RunStatus
from megamoe.resilience.watchdog import HEADING
from tests.support import checkpoint

NOW = 1_000_000.0


def write(folder: Path, silence_s: float = 1.0, age_s: float = 5.0, **beat: Any) -> None:
    """Write a run of two launches whose last step took two seconds."""
    launches = [{"time": NOW - 900, "from_step": 0}, {"time": NOW - 100, "from_step": 40, "host": "n2"}]
    (folder / "launches.jsonl").write_text("".join(f"{json.dumps(it)}\n" for it in launches))
    records = [
        {"step": step, "train/lm_loss": 9.0 - step / 100, "perf/step_s": 2.0, "perf/tokens_per_s": 500.0}
        for step in range(41, 51)
    ]
    torn = b'\n{"step": 51, "tra'
    (folder / "metrics.jsonl").write_bytes("\n".join(map(json.dumps, records)).encode() + torn)
    state = {"state": "running", "time": NOW - age_s, "silence_s": silence_s, "step": 50, "steps": 100}
    (folder / "heartbeat.json").write_text(json.dumps(state | beat))


def test_a_run_that_is_well(tmp_path: Path) -> None:
    write(tmp_path)
    checkpoint.write(tmp_path / "checkpoints/step_00000040")
    report = read_status(tmp_path, NOW)
    assert (report.verdict, report.step, report.steps, report.loss) == ("running", 50, 100, 8.5)
    assert (report.eta_s, report.tokens_per_s, report.silence_s) == (100.0, 500.0, 6.0)
    assert report.checkpoint == "step_00000040" and report.is_well
    rows = dict(line.split(maxsplit=1) for line in as_text(report).splitlines())
    assert rows["state"] == "running" and rows["restarts"] == "1, the last at step 40"
    assert newest_checkpoint(tmp_path).startswith("step_00000040 ")


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({"silence_s": 70.0}, "hung", "rank 0 is alive and made no progress for 1m15s"),
        ({"age_s": 61.0}, "crashed", "rank 0 ended without a report"),
        ({"age_s": 999.0, "state": "failed", "reason": "no memory"}, "failed", "no memory"),
        ({"age_s": 999.0, "state": "stopped", "reason": "signal SIGUSR1"}, "stopped", "signal SIGUSR1"),
        ({"age_s": 999.0, "state": "finished"}, "finished", ""),
    ],
)
def test_verdicts(change: dict[str, Any], verdict: str, reason: str, tmp_path: Path) -> None:
    write(tmp_path, **change)
    report = read_status(tmp_path, NOW)
    assert report.verdict == verdict and report.reason.startswith(reason)
    assert report.eta_s is None and is_complete(tmp_path) == (verdict == "finished")
    assert not is_complete(tmp_path, report.step + 1)  # of a run that is to go on
    assert is_complete(tmp_path, report.step) == (verdict == "finished")


def test_a_crash_is_explained_by_stacks_and_by_failures_of_the_last_launch(tmp_path: Path) -> None:
    write(tmp_path, age_s=100)
    (tmp_path / "failures").mkdir()
    for rank, age in ((1, 500), (3, 50)):
        failure = {"rank": rank, "host": "n2", "time": NOW - age, "reason": "ValueError: x"}
        (tmp_path / f"failures/rank_{rank:05d}.json").write_text(json.dumps(failure))
    report = read_status(tmp_path, NOW)
    assert report.reason == "a rank failed" and [it["rank"] for it in report.failures] == [3]
    assert "rank 3 on n2: ValueError: x" in as_text(report)
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/rank_00000.txt").touch()  # as at the start of every launch
    assert read_status(tmp_path, NOW).reason == "a rank failed"
    (tmp_path / "stacks/rank_00000.txt").write_text(f"{HEADING} 600 s, after 3 heartbeats\n")
    assert "ended by the watchdog" in read_status(tmp_path, NOW).reason


def test_what_a_launch_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environment_of_job").write_text("torch 2.13")
    monkeypatch.setenv("MEGAMOE_ENVIRONMENT", str(tmp_path / "environment_of_job"))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(heartbeat, "_last_s", time.monotonic() - 999)  # the start took so long
    run = tmp_path / "run"
    run.mkdir()
    heartbeat.tick()  # the last one may be as old as this process
    with RunStatus(run, 0, 2, lambda: 7, 9) as status:
        assert read_status(run).verdict == "running"
        status.reason = "signal SIGUSR1"
    assert (read_status(run).verdict, read_status(run).reason) == ("stopped", "signal SIGUSR1")
    copy = run / "environment/12.0.txt"
    assert copy.read_text() == "torch 2.13" and copy.stat().st_mode & 0o777 == 0o600
    for rank in (0, 1):
        with pytest.raises(ValueError), RunStatus(run, rank, 2, lambda: 7, 9):
            raise ValueError("a bug")
    report = read_status(run)
    assert (report.verdict, report.reason, report.step) == ("failed", "ValueError: a bug", 7)
    assert report.launches[-1]["job"] == "12.0"
    assert [(it["rank"], it["reason"]) for it in report.failures] == [(1, "ValueError: a bug")]


def test_a_task_of_an_array_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands take it, while the last task's SLURM_JOB_ID means the whole array to them."""
    names = {"JOB_ID": "12", "ARRAY_JOB_ID": "12", "ARRAY_TASK_ID": "3", "RESTART_COUNT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with RunStatus(tmp_path, 0, 1, lambda: 0, 9):
        assert read_status(tmp_path).launches[-1]["job"] == "12_3.1"


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_status(tmp_path / "x")
    assert read_status(tmp_path).verdict == "not started"
    assert newest_checkpoint(tmp_path) == "none"
