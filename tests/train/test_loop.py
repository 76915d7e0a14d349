"""Whole tiny runs: the files they leave, when they evaluate and save, and how they go on."""

import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megamoe.apps.report.record import read_metrics
from megamoe.config.schema import TrainConfig
from megamoe.errors import ExitCode, UserError
from megamoe.moe.part import StepContext
from megamoe.parallel.zero.engine import Engine
from megamoe.resilience.skipped_steps import Problem, SkipPolicy
from megamoe.train.loop import Loop, train
from megamoe.train.step_record import LayerRecord, StepRecord
from megamoe.train.trainer import Progress, Trainer
from tests.support.tiny import restored_process, tiny

# The batch grows 2, 2, 4 and is 6 from the fourth step on: two increments of 4 samples each.
WHOLE = [
    "name=a",
    "train.steps=6",
    "train.global_batch_size=6",
    "train.batch_rampup={start: 2, increment: 2, samples: 8}",
    "data.validation={code: [unused]}",
    "evaluation={every: 2, batches: 2, at_start: true}",
    "checkpoint={every: 2, keep: 2}",
    "moe.losses={switch_balance: 0.01}",
    "optimizer.warmup_steps=2",
]
LASTING = ("time", "perf/tokens_per_s", "perf/step_s", "perf/tflops_per_rank")
OVERALL = (
    "imbalance", "max_vio", "max_vio_run", "load_cv", "dead", "dropped", "experts_per_token", "gate_entropy",
    "top1_prob",
)  # fmt: skip
OF_A_LAYER = ("load", "width_histogram", "loss/switch_balance", "scorer/embedding_norm")


def run(output: Path, *overrides: str, code: ExitCode = ExitCode.FINISHED) -> list[dict[str, Any]]:
    """Train; returns the lines of metrics.jsonl."""
    with restored_process():
        assert train(tiny(f"output={output}", *overrides)) == code
    return [json.loads(line) for line in next(output.glob("*/metrics.jsonl")).read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in LASTING} for row in rows]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoints/*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """(folder, rows) of a run from its first to its last step."""
    output = tmp_path_factory.mktemp("whole")
    rows = run(output, *WHOLE, "log.report=true", "train.profiler={start_step: 2, num_steps: 2}")
    return output / "a", rows


def test_files_of_a_run(whole: tuple[Path, Any]) -> None:
    folder, _ = whole
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "summary.json", "metrics.jsonl", "checkpoints", "profile", "report.html",
        "heartbeat.json", "launches.jsonl",
    }  # fmt: skip
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["steps"] == 6
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["vocabulary"], summary["ranks"], summary["precision"]) == (48, 1, "fp32")
    assert summary["parameters_total"] > summary["parameters_active"]
    assert checkpoints(folder) == ["latest", "step_00000004", "step_00000006"]
    assert json.loads((folder / "checkpoints/step_00000004/checkpoint.json").read_text())["step"] == 4


def test_profile_of_two_steps(whole: tuple[Path, Any]) -> None:
    events = json.loads((whole[0] / "profile" / "rank_00000.json").read_text())["traceEvents"]
    steps = [event for event in events if str(event.get("name")).startswith("Optimizer.step")]
    outermost, end = 0, -math.inf  # torch may record a subclass's step and its base's inside it
    for event in sorted(steps, key=lambda event: float(event["ts"])):
        if event["ts"] >= end:
            outermost, end = outermost + 1, event["ts"] + event["dur"]
    assert outermost == 2


def test_every_step_is_recorded_with_its_keys(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    start, *rows = whole[1]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    always = {
        "step", "tokens", "train/lm_loss", "train/loss", "train/switch_balance", "train/grad_norm",
        "train/switch_balance/weighted", "train/lr", "train/batch_size", "perf/gflops_per_token", *LASTING,
        *(f"moe/{what}" for what in OVERALL),
        *(f"moe/layer_{n}/{what}" for n in ("01", "02") for what in (*OVERALL, *OF_A_LAYER)),
    }  # fmt: skip
    evaluated = {"val/lm_loss", "val/code/lm_loss"}
    assert start.keys() == {"step", "tokens"} | evaluated
    assert [row.keys() - always for row in rows] == [set(), evaluated] * 3
    assert all(always <= row.keys() for row in rows)
    assert [row["train/batch_size"] for row in rows] == [2, 2, 4, 6, 6, 6]
    assert [row["tokens"] for row in rows] == [16, 32, 64, 112, 160, 208]
    # Warm-up of 2 steps to 3e-4, then half a cosine over 4.
    cosine = [0.5, 1, *((1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4))]
    assert [row["train/lr"] for row in rows] == pytest.approx([3e-4 * share for share in cosine], abs=1e-12)
    for row in rows:
        assert sum(row["moe/layer_01/load"]) == 2 * 8 * row["train/batch_size"]  # two experts a token
        assert math.isfinite(row["train/lm_loss"]) and row["train/grad_norm"] > 0


def step_with_a_signal(*after: int) -> Any:
    """`Trainer.step`, with SIGTERM to this process before the steps that follow these ones."""
    step = Trainer.step

    def step_and_signal(self: Trainer) -> Any:
        if self.progress.step in after:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    return step_and_signal


@pytest.mark.parametrize("way", ["exit_after_steps", "signal"])
def test_a_stopped_run_resumes_as_if_it_had_not_stopped(
    whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    stop = ["train.exit_after_steps=3"] if way == "exit_after_steps" else []
    if way == "signal":
        monkeypatch.setattr(Trainer, "step", step_with_a_signal(2))
    code = ExitCode.STOPPED if way == "signal" else ExitCode.FINISHED
    assert [row["step"] for row in run(tmp_path, *WHOLE, *stop, code=code)] == [0, 1, 2, 3]
    assert (tmp_path / "a/checkpoints/latest").read_text() == "step_00000003"
    monkeypatch.undo()
    rows = run(tmp_path, *WHOLE, "checkpoint.resume=auto")
    assert without_times(rows) == without_times(whole[1])


def test_after_a_signal_a_due_evaluation_does_not_delay_the_save(tmp_path: Path, monkeypatch: Any) -> None:
    """torchrun kills the ranks 30 s after a signal. The last step's evaluation is the run's result."""
    monkeypatch.setattr(Trainer, "step", step_with_a_signal(1, 3))
    common = ["name=a", "evaluation={every: 1, batches: 1}", "checkpoint.resume=auto"]
    rows = run(tmp_path, *common, code=ExitCode.STOPPED)
    assert ["val/lm_loss" in row for row in rows] == [True, False]
    rows = run(tmp_path, *common)
    assert ["val/lm_loss" in row for row in rows] == [True, False, True, True]


def test_nothing_is_left_to_do_in_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run(tmp_path, "train.steps=1")
    line = "the run is complete after step 1; a larger train.steps goes on"
    assert line not in capsys.readouterr().out
    assert run(tmp_path, "train.steps=1", "checkpoint.resume=auto") == before
    assert line in capsys.readouterr().out


def test_a_launch_does_not_go_back_behind_one_that_saved_while_it_started(tmp_path: Path) -> None:
    run(tmp_path, "name=a", "train.steps=4", "train.exit_after_steps=1")
    with restored_process():
        late = Trainer(tiny(f"output={tmp_path}", "name=a", "train.steps=4", "checkpoint.resume=auto"))
        saved = tmp_path / "a/checkpoints"
        shutil.copytree(saved / "step_00000001", saved / "step_00000002")  # as the other launch would
        (saved / "latest").write_text("step_00000002")
        record = (tmp_path / "a/metrics.jsonl").read_bytes()
        try:
            with pytest.raises(UserError, match="another launch saves or deletes checkpoints in it"):
                Loop(late).run()
        finally:
            late.close()
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == record


def test_record_at_intervals_and_where_something_happened(tmp_path: Path) -> None:
    common = ["train.steps=7", "log.every=3", "evaluation.every=5", "evaluation.batches=1"]
    rows = run(tmp_path / "whole", *common)
    evaluated = {row["step"]: "val/lm_loss" in row for row in rows}
    assert evaluated == {3: False, 5: True, 6: False, 7: True}
    rows = run(tmp_path / "stopped", *common, "train.exit_after_steps=2")
    assert [row["step"] for row in rows] == [2]


def times(factor: float, *numbers: int) -> Any:
    """`Engine.forward`, with the losses of the calls of these numbers, from 1, times a factor."""
    forward, calls = Engine.forward, itertools.count(1)
    return lambda *args, **inputs: forward(*args, **inputs) * (factor if next(calls) in numbers else 1)


def test_a_skipped_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "forward", times(math.nan, 3))
    options = ("log.every=9", "train.steps=8", "train.global_batch_size=4", "evaluation.batches=0")
    rows = {row["step"]: row for row in run(tmp_path, *options)}
    assert list(rows) == [2, 8]
    assert rows[2]["train/lm_loss"] == "NaN"


def test_a_dense_run_that_saves_and_evaluates_nothing(tmp_path: Path) -> None:
    rows = run(tmp_path, "moe.layers=none", "checkpoint.save_at_end=false", "evaluation.batches=0")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert not any(key.startswith(("moe/", "val/")) for row in rows for key in row)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_learns(tmp_path: Path) -> None:
    """Nine of ten mock tokens follow from the one before."""
    settings = ["train.steps=60", "train.micro_batch_size=8", "optimizer.lr=0.02", "evaluation.at_start=true"]
    rows = run(tmp_path, *settings, "checkpoint.save_at_end=false")
    first, last = rows[0]["val/lm_loss"], rows[-1]["val/lm_loss"]
    assert first == pytest.approx(math.log(48), abs=0.05)
    assert last < 0.7 * first


def test_launches_of_a_process_are_independent(tmp_path: Path) -> None:
    """The same run twice in one process gives the same record, and no process group stays."""
    import torch.distributed as dist

    first, second = (run(tmp_path / name, "model.hidden_dropout=0.1") for name in ("first", "second"))
    assert without_times(first) == without_times(second)
    assert not dist.is_initialized()


def test_the_test_set_is_evaluated_once_at_the_end(tmp_path: Path) -> None:
    rows = run(tmp_path, "data.split=[0.8, 0.1, 0.1]", "train.steps=3", "evaluation={every: 1, batches: 1}")
    assert ["test/lm_loss" in row for row in rows] == [False, False, True]
    assert math.isfinite(rows[-1]["test/lm_loss"])
    assert rows[-1]["test/lm_loss"] != rows[-1]["val/lm_loss"]


def test_a_step_that_breaks_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    broken = ["optimizer.grad_clip=0", "train.steps=9", "checkpoint.every=1", "train.max_skipped_in_a_row=2"]
    config = tiny(f"output={tmp_path}", *broken)
    config.optimizer.lr = 1e30  # more than a configuration may say
    with (
        restored_process(),
        pytest.raises(UserError, match=r"^step \d+: train/\w+ is .*Lower optimizer.lr") as ended,
    ):
        train(config)
    (folder,) = tmp_path.iterdir()
    last = int(str(ended.value).split(":")[0].removeprefix("step "))
    assert max(checkpoints(folder)) == f"step_{last - 2:08d}"
    assert str(ended.value).endswith(
        f"go on from the last good checkpoint, {folder}/checkpoints/{max(checkpoints(folder))}"
    )


def test_steps_with_a_loss_of_nan_are_reported_counted_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight steps, 4, 5 and 8 are skipped; a checkpoint that is due waits for step 6, and for the end."""
    monkeypatch.setattr(Engine, "forward", times(math.nan, 4, 5, 8))
    rows = run(tmp_path, "train.steps=8", "checkpoint={every: 2, keep: 9}", "train.max_skipped_in_a_row=3")
    assert [row.get("train/skipped_steps") for row in rows] == [None, None, None, 1, 2, 2, 2, 3]
    assert [row["step"] for row in rows if row["train/lm_loss"] == "NaN"] == [4, 5, 8]
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == list(range(1, 9))
    assert checkpoints(tmp_path / "run") == ["latest", *(f"step_{n:08d}" for n in (2, 6, 8))]
    reported = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert reported.pop() == "the last step was skipped; the checkpoint holds the weights from before"
    assert reported == [
        f"step {step}: train/lm_loss is nan; samples {a} to {b}; "
        f"not finite: {a}, {b} (rank 0, micro batch 1); skipped"
        for step, a, b in ((4, 6, 7), (5, 8, 9), (8, 14, 15))
    ]


def test_a_skipped_step_names_the_first_layer_that_is_not_finite() -> None:
    counts = torch.ones(2, dtype=torch.int64)
    layers = {n: LayerRecord(counts, counts, counts, entropy=math.nan if n > 3 else 1.0) for n in (2, 4, 6)}
    record = StepRecord(tokens=1.0, layers=layers, problem=Problem("train/grad_norm is nan"))
    trainer: Any = SimpleNamespace(
        progress=Progress(samples=8), context=StepContext(step=3), skip_policy=SkipPolicy(TrainConfig())
    )
    Trainer._report_problem(trainer, record, 4)
    where = "first MoE layer whose router's probabilities are not finite: 4"
    assert record.message == f"step 3: train/grad_norm is nan; samples 8 to 11; {where}; skipped"


def test_a_spike_stops_the_run_if_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "forward", times(9, 4))
    rule = "train.loss_spike={sigmas: 20, window: 3, action: stop}"
    with pytest.raises(
        UserError, match=r"^step 4: train/lm_loss .*samples 6 to 7; train.loss_.*action is sto"
    ):
        run(tmp_path, "train.steps=8", rule)


def test_an_attempt_without_a_checkpoint_is_set_aside_on_resuming(tmp_path: Path) -> None:
    first = run(tmp_path, "name=a", "train.steps=2", "checkpoint.save_at_end=false")
    run(tmp_path, "name=a", "train.steps=2", "checkpoint.resume=auto")
    kept = [json.loads(line) for line in (tmp_path / "a.before-1/metrics.jsonl").read_text().splitlines()]
    assert kept == first
    assert checkpoints(tmp_path / "a") == ["latest", "step_00000002"]
