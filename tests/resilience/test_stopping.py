"""Reasons to stop, and the profiler's window of steps."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.config.schema import ProfilerConfig, TrainConfig
from megamoe.resilience import stopping
from megamoe.resilience.stopping import StopRule
from megamoe.train.speed import ProfilerWindow
from megamoe.train.trainer import Progress


@pytest.mark.parametrize("limit", [2, None])
def test_after_so_many_steps_of_this_launch(limit: int | None) -> None:
    rule = StopRule(TrainConfig(exit_after_steps=limit))
    rule.step_done()
    assert rule.reason() is None
    rule.step_done()
    assert rule.reason() == (None if limit is None else "train.exit_after_steps 2")


def test_after_so_many_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: clock.now))
    rule = StopRule(TrainConfig(exit_after_minutes=1.5))
    clock.now += 89.9
    assert rule.reason() is None
    clock.now += 0.1
    assert rule.reason() == "train.exit_after_minutes 1.5"
    began_before = StopRule(TrainConfig(exit_after_minutes=1.5), started=clock.now - 90)
    assert began_before.reason() == "train.exit_after_minutes 1.5"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal(number: signal.Signals, restored_process: None) -> None:
    rule = StopRule(TrainConfig())
    rule.listen()
    assert rule.reason() is None
    os.kill(os.getpid(), number)
    assert rule.reason() == f"signal {number.name}"


def test_all_ranks_follow_the_largest_vote() -> None:
    rule = StopRule(TrainConfig(exit_after_minutes=1.5))
    assert rule.vote() == 0 and rule.agree(0) is None and not rule.by_signal
    assert rule.agree(1) == "train.exit_after_minutes 1.5" and not rule.by_signal
    assert rule.agree(2) == "another rank received a signal" and rule.by_signal
    late = StopRule(TrainConfig(exit_after_minutes=1.5), started=-1e9)
    assert late.vote() == 1 and late.agree(1) == late.reason() == "train.exit_after_minutes 1.5"


def recorded_steps(folder: Path, config: ProfilerConfig, steps: range) -> tuple[list[int], list[Path]]:
    """Return the `steps` in the trace, and the paths that the window returned."""
    said: list[str] = []
    world = SimpleNamespace(rank=3, say=said.append)
    trainer: Any = SimpleNamespace(progress=Progress(), folder=SimpleNamespace(path=folder), world=world)
    window = ProfilerWindow(config)
    for step in steps:
        trainer.progress.step = step - 1
        window.on_step_begin(trainer)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(2).sum()
        trainer.progress.step = step
        window.on_step_end(trainer, {})
    window.on_train_end(trainer)
    paths = [Path(line.removeprefix("profile: ")) for line in said]
    names = {event.get("name") for path in paths for event in json.loads(path.read_text())["traceEvents"]}
    assert not paths or "aten::sum" in names
    return [step for step in steps if f"step {step}" in names], paths


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(1, 7), [3, 4]),
        (range(1, 4), [3]),  # the run ends within the window
        (range(1, 3), []),
        (range(4, 7), []),  # resumed within the window: its first step is not there
    ],
)
def test_profiler_records_its_window(tmp_path: Path, steps: range, expected: list[int]) -> None:
    found, paths = recorded_steps(tmp_path, ProfilerConfig(start_step=3, num_steps=2), steps)
    assert found == expected
    assert paths == ([tmp_path / "profile" / "rank_00003.json"] if expected else [])


def test_profiler_off_by_default(tmp_path: Path) -> None:
    assert recorded_steps(tmp_path, ProfilerConfig(), range(1, 3)) == ([], [])
    assert not (tmp_path / "profile").exists()
