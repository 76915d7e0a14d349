"""What arrives at a W&B server, by upload and by `wandb sync`, beside metrics.jsonl.

The server is tests/support/fakes/wandb_server.py on the loopback address; the client is W&B's own.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.report.record import read_metrics
from megamoe.config.schema import LogConfig, WandbConfig
from megamoe.metrics.recorder import Recorder
from megamoe.metrics.sinks.summaries import summary_of
from megamoe.metrics.sinks.wandb_sink import _for_wandb
from tests.metrics.test_summaries import step_of
from tests.support.fakes.wandb_server import KEY, SentRun, WandbServer, serving
from tests.support.tiny import BASE

wandb = pytest.importorskip("wandb")

ROOT = Path(__file__).parents[2]
TOLD = {"seed": 7, "layout": "ranks 1", "study": "capacity"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A server, at which this process and its children are logged in."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    with serving() as state:
        for name, value in {
            "WANDB_BASE_URL": state.url,
            "WANDB_API_KEY": KEY,
            "NETRC": str(tmp_path / "netrc"),
            **{f"WANDB_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "CACHE", "DATA")},
        }.items():
            monkeypatch.setenv(name, value)
        wandb.teardown()  # W&B reads these variables once
        try:
            yield state
        finally:
            wandb.teardown()
    assert (state.unknown, state.unauthorized) == ([], [])


def open_recorder(folder: Path, resumed_step: int | None = None, mode: Any = "auto") -> Recorder:
    options = WandbConfig(enabled=True, project="p", group="capacity", tags=["t"], mode=mode)
    log = LogConfig(wandb=options)
    return Recorder.open(folder, log, "named", TOLD, resumed_step)


def logged(step: int, **changes: Any) -> dict[str, Any]:
    """A step with every metric that there is; some numbers depend on the step."""
    return {
        **step_of(2, 4, step),
        "train/lm_loss": 3.0 / step,
        "moe/layer_01/load": [step, 3, 0, 1],
        **changes,
    }


def last_rows(run: SentRun) -> dict[int, dict[str, Any]]:
    """The last row of each step, in the order of the file."""
    counters = [row["_step"] for row in run.history]
    assert counters == sorted(set(counters)), "W&B's counter grows: it drops what goes back"
    return {row["step"]: row for row in run.history}


def check_history(run: SentRun, metrics_file: Path) -> None:
    """Compare the last row of every step with metrics.jsonl, key by key."""
    rows = last_rows(run)
    records = read_metrics(metrics_file)
    assert list(rows) == [record["step"] for record in records] and rows
    for record in records:
        expected, row = _for_wandb(summary_of(record)), rows[record["step"]]
        assert {key for key in row if not key.startswith("_")} == set(expected)
        for key, value in expected.items():
            if isinstance(value, wandb.Histogram):
                assert row[key]["values"] == value.histogram and row[key]["bins"] == value.bins, key
            else:
                assert row[key] == pytest.approx(value, rel=0, abs=0, nan_ok=True), key


def check_run(server: WandbServer) -> SentRun:
    """The one run that arrived, whose configuration has what runs are grouped by."""
    (run,) = server.runs.values()
    assert {key: run.values[key] for key in ("displayName", "project", "groupName", "tags")} == {
        "displayName": "named",
        "project": "p",
        "groupName": "capacity",
        "tags": ["t"],
    }
    assert run.config == TOLD
    return run


@pytest.mark.full
def test_what_is_uploaded_is_what_metrics_jsonl_has(server: WandbServer, tmp_path: Path) -> None:
    """The end of a launch arrives too, and a resumed run goes on in the same one."""
    recorder = open_recorder(tmp_path)
    for step in (1, 2):
        recorder.log(logged(step))
    recorder.log(logged(3, **{"train/lm_loss": float("nan")}))
    recorder.close()
    run = check_run(server)
    check_history(run, tmp_path / "metrics.jsonl")
    recorder = open_recorder(tmp_path, resumed_step=2)
    for step in (3, 4):
        recorder.log(logged(step))
    recorder.close()
    assert run is check_run(server) and len(run.history) == 5 and run.exits == [0, 0]
    check_history(run, tmp_path / "metrics.jsonl")


def sync(*folders: Path) -> None:
    """Run `wandb sync`, as a user does who has been offline."""
    command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_what_is_synchronised_is_what_metrics_jsonl_has(server: WandbServer, tmp_path: Path) -> None:
    """An offline run and its resumption: two folders, one run, in one command and one after the other."""
    for folder, together in ((tmp_path / "together", True), (tmp_path / "apart", False)):
        server.runs.clear()
        for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
            recorder = open_recorder(folder, resumed_step, mode="offline")
            for step in steps:
                recorder.log(logged(step))
            recorder.close()
            wandb.teardown()
        assert not server.runs, "nothing is sent while it is offline"
        offline = sorted((folder / "wandb").glob("offline-run-*"))
        assert len(offline) == 2
        for each in [offline] if together else [[one] for one in offline]:
            sync(*each)
        run = check_run(server)
        assert len(run.history) == 5
        check_history(run, folder / "metrics.jsonl")


def train(folder: Path, *overrides: str) -> None:
    """Run the entry script on the tiny model."""
    options = [*BASE, f"output={folder}", "name=named", "log.wandb.enabled=true", "log.wandb.project=p"]
    options += ["log.wandb.group=capacity", "log.every=1"]
    config = folder / "empty.yaml"
    config.write_text("{}\n")
    script = str(ROOT / "pretrain_gpt_moe.py")
    command = [sys.executable, script, "--config", str(config), *options, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_training_and_its_resumption_arrive(server: WandbServer, tmp_path: Path, mode: str) -> None:
    train(tmp_path, f"log.wandb.mode={mode}", "train.exit_after_steps=2", "checkpoint.every=1")
    train(tmp_path, f"log.wandb.mode={mode}", "checkpoint.resume=auto", "seed=1234")
    if mode == "offline":
        assert not server.runs
        sync(*sorted((tmp_path / "named/wandb").glob("offline-run-*")))
    (run,) = server.runs.values()
    assert list(last_rows(run)) == [1, 2, 3, 4]
    check_history(run, tmp_path / "named/metrics.jsonl")
    assert run.config["layout"] == "ranks 1, tensor 1, expert 1, expert tensor 1, ZeRO 0"
    assert (run.config["study"], run.config["seed"]) == ("capacity", 1234)
    assert run.config["moe"]["num_experts"] == 4


@pytest.mark.full
def test_a_server_that_refuses_costs_one_warning(
    server: WandbServer, tmp_path: Path, logged_warnings: list[logging.LogRecord]
) -> None:
    server.refuses = True
    recorder = open_recorder(tmp_path)
    recorder.log(logged(1))
    recorder.close()
    server.unknown.clear()
    warnings = [entry.getMessage() for entry in logged_warnings if entry.name.startswith("megamoe")]
    assert len(warnings) == 1 and warnings[0].endswith("the run goes on without it")
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
