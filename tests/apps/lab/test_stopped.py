"""Runs that end before their last step: what the lab records of them, and how it goes on."""

import json
from pathlib import Path

import pytest

from megamoe.apps.lab.runner import Runner, TaskRecord
from megamoe.apps.lab.tasks import Task

TRAINS = """
import json, pathlib, sys
folder, steps, code = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
beat = folder / "heartbeat.json"
step = json.loads(beat.read_text())["step"] if beat.exists() else 0
beat.write_text(json.dumps({"step": step + steps, "steps": 6}))
sys.exit(code)
"""


def outcome(folder: Path, task: Task) -> TaskRecord:
    runner = Runner(folder, [None], print)
    runner.run([task])
    return runner.record(task)


@pytest.mark.parametrize("steps", [6, 0])
@pytest.mark.parametrize("code", [0, 75])
def test_a_run_that_stops_before_its_last_step_is_not_done(tmp_path: Path, steps: int, code: int) -> None:
    """As by train.exit_after_steps, or by a signal; of a run of epochs the heartbeat has the steps."""
    script = ("-c", TRAINS, str(tmp_path / "runs/a"))
    task = Task("a", tmp_path / "runs/a", (*script, "2", str(code)), "a", steps=steps)
    found = outcome(tmp_path, task)
    assert (found.state, found.problem) == (
        "stopped",
        "stopped at step 2 of 6; the same command goes on with it",
    )
    whole = Task("a", tmp_path / "runs/a", (*script, "4", "0"), "a", steps=steps)
    assert outcome(tmp_path, whole).state == "done"
    assert json.loads((tmp_path / "tasks/a.json").read_text())["problem"] == ""


def test_what_needs_a_stopped_task_is_not_run(tmp_path: Path) -> None:
    """A fine-tuning with such a code has no steps to tell."""
    stops = Task("a", tmp_path / "stages/a", ("-c", "raise SystemExit(75)"), "a")
    after = Task("b", tmp_path / "stages/b", ("-c", "raise SystemExit(1)"), "b", ("a",))
    runner = Runner(tmp_path, [None], print)
    runner.run([stops, after])
    assert runner.problem_of(stops) == "stopped; the same command goes on with it"
    assert runner.problem_of(after) == "a is not complete"
