"""Slow ranks are named after some windows of steps, by their own times; noise names nobody."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megamoe.apps.cluster.status import as_text, read_status
from megamoe.moe import timers
from megamoe.moe.timers import LocalComputeTimer
from megamoe.resilience.stragglers import IN_A_ROW, STRAGGLERS, Stragglers

HOSTS = ["n1", "n1", "n2", "n2"]


def told(stragglers: Stragglers, times_SR: "np.ndarray") -> list[tuple[int, str]]:
    """Return the lines with the numbers of their steps."""
    return [(step, line) for step, row in enumerate(times_SR, 1) for line in stragglers.add(row.tolist())]


def test_a_slow_rank_is_named_once_and_its_end_is_told(tmp_path: Path) -> None:
    stragglers = Stragglers(1.5, 1, HOSTS, tmp_path)
    times_SR = np.full((70, 4), 0.1)
    times_SR[4:47, 2] = 0.2  # most steps of windows 1 to 5
    assert told(stragglers, times_SR[:49]) == [
        (30, "straggler: for 30 steps, rank 2 on n2 took 2.0 times the ranks' median for its own work at the "
             "beginning of a step (0.2 s and 0.1 s)"),
    ]  # fmt: skip
    assert json.loads((tmp_path / STRAGGLERS).read_text()) == {
        "ranks": [{"rank": 2, "host": "n2", "times": 2.0}]
    }
    assert "straggler      rank 2 on n2: 2.0 times the median" in as_text(read_status(tmp_path))
    assert stragglers.metrics == {
        "perf/own_s": pytest.approx(0.1), "perf/slowest_own_s": pytest.approx(0.2),
        "perf/slowest_rank": 2, "perf/stragglers": 1,
    }  # fmt: skip
    assert told(stragglers, times_SR[49:]) == [(11, "rank 2 on n2 is no longer slow")]
    assert not (tmp_path / STRAGGLERS).exists() and stragglers.metrics["perf/stragglers"] == 0


def test_ranks_are_compared_within_their_pipeline_stage(tmp_path: Path) -> None:
    """The second stage has twice the work, and one of its three ranks is slow."""
    stragglers = Stragglers(1.5, 1, ["n1"] * 3 + ["n2"] * 3, tmp_path, stage_ranks=3)
    ((_, line),) = told(stragglers, np.tile([0.1, 0.1, 0.1, 0.2, 0.2, 0.4], (30, 1)))
    assert "rank 5 of pipeline stage 1 on n2 took 2.0 times" in line
    alone = Stragglers(1.5, 1, ["n1"] * 2, tmp_path, stage_ranks=1)
    assert told(alone, np.tile([0.1, 0.4], (60, 1))) == []


@pytest.mark.parametrize("every", [1, 4, 25])
def test_windows_are_multiples_of_the_log_interval(every: int, tmp_path: Path) -> None:
    stragglers = Stragglers(1.5, every, ["a", "b"], tmp_path)
    window = {1: 10, 4: 12, 25: 25}[every]
    times_SR = np.tile([0.1, 0.16], (200, 1))
    assert [step for step, _ in told(stragglers, times_SR)] == [IN_A_ROW * window]


def test_noise_and_what_was_not_measured_name_nobody(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    # Spikes of 10 times in one step of ten, and every second window slow for one rank.
    times_SR = 0.1 * generator.lognormal(0, 0.2, (400, 4)) * np.where(generator.random((400, 4)) < 0.1, 10, 1)
    times_SR[np.arange(400) // 10 % 2 == 0, 3] *= 4
    (tmp_path / STRAGGLERS).write_text("{}")  # of an earlier launch
    stragglers = Stragglers(1.5, 1, HOSTS, tmp_path)
    assert told(stragglers, times_SR) == [] and not (tmp_path / STRAGGLERS).exists()
    times_SR[:, 1] = 0.0
    assert told(Stragglers(1.5, 1, HOSTS, tmp_path), times_SR) == []
    assert told(Stragglers(1.5, 1, ["n1"], tmp_path), times_SR[:, :1]) == []


def test_own_time_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 11.0, 13.0, 100.0])
    monkeypatch.setattr(timers.time, "perf_counter", lambda: next(clock))
    own = LocalComputeTimer(torch.device("cpu"))
    own.pause()  # nothing before a step
    own.begin()
    assert own.seconds == 0.0
    own.pause()
    own.resume()
    own.end()
    own.end()
    own.pause()  # nothing after the first micro batch
    own.begin()
    assert own.seconds == 1.0 + 2.0


def test_the_cost_of_a_step(tmp_path: Path) -> None:
    """It is microseconds of a step: 200 marks and the judgement of 64 ranks."""
    own, stragglers = LocalComputeTimer(torch.device("cpu")), Stragglers(1.5, 1, ["n"] * 64, tmp_path)
    begin = time.process_time()
    for _ in range(100):
        own.begin()
        for _ in range(100):
            own.pause()
            own.resume()
        own.end()
        stragglers.add([0.1] * 64)
    assert (time.process_time() - begin) / 100 < 2e-3
