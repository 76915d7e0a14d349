"""W&B at arm's length: offline without a login, the same run after a resume, and no harm when it fails."""

import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.report.record import read_metrics
from megamoe.config.schema import LogConfig, WandbConfig
from megamoe.metrics.recorder import Recorder
from megamoe.metrics.sinks.wandb_sink import choose_mode

wandb = pytest.importorskip("wandb")
pytestmark = pytest.mark.usefixtures("nobody_is_logged_in")


class FakeRun:
    """Keeps what the sink hands to W&B."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.counters: list[int] = []

    def init(self, **arguments: Any) -> "FakeRun":
        self.inits.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, metrics: dict[str, Any], step: int, commit: bool) -> None:
        assert commit, "a row with a step is otherwise sent with the next one"
        self.logged.append(metrics)
        self.counters.append(step)

    def finish(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun()
    monkeypatch.setattr(wandb, "init", run.init)
    return run


def open_recorder(folder: Path, resumed_step: int | None = None) -> Recorder:
    return Recorder.open(folder, LogConfig(wandb=WandbConfig(enabled=True)), "run", {"seed": 7}, resumed_step)


def test_auto_is_online_only_with_a_login(nobody_is_logged_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_mode("auto") == "offline"
    assert choose_mode("online") == "offline", "asking for a key would hang a batch job"
    for host in ("api.wandb.ai", "api.forge.coreweave.com"):
        nobody_is_logged_in.write_text(f"machine {host} login user password made-up\n")
        assert choose_mode("auto") == "online"
    assert choose_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode("auto") == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert choose_mode("auto") == "offline", "a login for another server does not count"


def test_an_offline_run_is_recorded_without_network_and_secrets(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JWT", "eyJ_hidden")
    monkeypatch.setattr("sys.argv", ["train", "s3.secret=hidden"])
    recorder = open_recorder(tmp_path / "run")
    recorder.log({"step": 1, "train/lm_loss": 2.0, "moe/layer_02/load": [3, 1]})
    recorder.close()
    run_id = (tmp_path / "run" / "wandb_run_id.txt").read_text().strip()
    (recorded,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")
    deadline = time.monotonic() + 10.0
    while b"train/lm_loss" not in recorded.read_bytes():  # W&B's own process may write after finish()
        assert time.monotonic() < deadline, "the metrics never reached W&B's file"
        time.sleep(0.05)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"hidden" in path.read_bytes()]


def test_a_load_becomes_summaries_and_a_histogram(tmp_path: Path, run: FakeRun) -> None:
    open_recorder(tmp_path).log({"step": 100, "train/lr": 0.1, "moe/layer_02/load": [3, 0, 1, 4]})
    (logged,) = run.logged
    histogram = logged.pop("load/histogram")
    assert sum(histogram.histogram) == 4 and len(histogram.bins) == len(histogram.histogram) + 1
    assert (logged["step"], logged["train/lr"], logged["load/max"]) == (100, 0.1, 2.0)
    assert run.inits[0]["config"] == {"seed": 7}


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path: Path, monkeypatch: Any, run: FakeRun) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "made-up")
    for resumed_step in (None, 1, None):
        open_recorder(tmp_path, resumed_step).close()
    first, again, anew = run.inits
    assert first["id"] == again["id"] != anew["id"]
    assert (first["resume"], again["resume"], first["mode"]) == (None, "allow", "online")


def test_the_counter_grows_over_launches_that_repeat_steps(tmp_path: Path, run: FakeRun) -> None:
    """The launches log 10-50, resume after 20, after 60, and after 30."""
    for resumed_step, steps in ((None, (10, 50)), (20, (30, 60)), (60, (70,)), (30, (40,))):
        recorder = open_recorder(tmp_path, resumed_step)
        for step in steps:
            recorder.log({"step": step})
        recorder.close()
    assert [row["step"] for row in run.logged] == [10, 50, 30, 60, 70, 40]
    assert run.counters == [10, 50, 60, 90, 100, 110]
    open_recorder(tmp_path).log({"step": 1})
    assert run.counters[-1] == 1, "a new run in the same folder"


@pytest.mark.parametrize("where", ["import", "init", "log", "finish"])
def test_a_failing_wandb_costs_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged_warnings: list[logging.LogRecord],
    run: FakeRun,
    where: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise wandb.errors.CommError("no route\nand a long explanation")

    if where == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        monkeypatch.setattr(wandb if where == "init" else run, where, fail)
    recorder = open_recorder(tmp_path)
    recorder.log({"step": 1})
    recorder.log({"step": 2})
    recorder.close()
    (warning,) = [entry.getMessage() for entry in logged_warnings]
    reason = "ModuleNotFoundError: " if where == "import" else "CommError: no route); "
    assert warning.startswith(f"W&B failed ({reason}") and warning.endswith("the run goes on without it")
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_the_limits_keep_wandb_from_hanging(tmp_path: Path, run: FakeRun) -> None:
    open_recorder(tmp_path).close()
    settings: SimpleNamespace = run.inits[0]["settings"]
    assert 0 < settings.init_timeout <= 60 and 0 < settings.finish_timeout <= 60
