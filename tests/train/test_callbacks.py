"""Callbacks: called in the loop's order on every rank; a mistake in one ends the run with its line."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from megamoe.config import load_config
from megamoe.errors import ExitCode, UserError
from megamoe.parallel.launch import free_port
from megamoe.registry import register
from megamoe.train.callbacks import Callback, Callbacks, TrainingRun
from megamoe.train.loop import train
from tests.support.tiny import BASE, restored_process, tiny

ROOT = Path(__file__).parents[2]
HEAD = """
from dataclasses import dataclass
from megamoe.registry import register
from megamoe.train.callbacks import Callback

@register("callback", "mine")
class Mine(Callback):
"""


def run(output: Path, *overrides: str) -> ExitCode:
    with restored_process():
        return train(tiny(f"output={output}", *overrides))


def test_the_hooks_are_called_in_the_loops_order(own_registry: None, tmp_path: Path) -> None:
    message: list[str] = []

    @register("callback", "witness")
    class Witness(Callback):
        @dataclass
        class Config:
            mark: str = "w"

        def on_train_begin(self, trainer: TrainingRun) -> None:
            assert (trainer.folder.path / "config.yaml").is_file()
            message.append(f"{self.config.mark} begin {trainer.progress.step}")

        def on_step_begin(self, trainer: TrainingRun) -> None:
            message.append(f"before {trainer.progress.step + 1}")

        def on_step_end(self, trainer: TrainingRun, metrics: Mapping[str, Any]) -> None:
            assert metrics["step"] == trainer.progress.step and metrics["train/lm_loss"] > 0
            with pytest.raises(TypeError):
                metrics["mine"] = 1  # type: ignore[index]
            message.append(f"after {trainer.progress.step}")

        def on_evaluate(self, trainer: TrainingRun, metrics: Mapping[str, float]) -> None:
            assert list(metrics) == ["val/lm_loss"]
            message.append(f"evaluated {trainer.progress.step}")

        def on_save(self, trainer: TrainingRun, path: Path) -> None:
            assert (path / "SHA256SUMS").is_file() and path == trainer.last_checkpoint
            message.append(f"saved {path.name}")

        def on_train_end(self, trainer: TrainingRun) -> None:
            message.append("end")

    settings = ["train.steps=3", "checkpoint={every: 2, background: false}", "data.split=[0.9, 0.1, 0]"]
    settings += ["evaluation={every: 2, batches: 1, at_start: true}"]
    callbacks = "train.callbacks=[{name: witness, mark: a}]"
    assert run(tmp_path, *settings, callbacks, "train.exit_after_steps=2") == ExitCode.FINISHED
    first = ["a begin 0", "evaluated 0", "before 1", "after 1", "before 2", "after 2", "evaluated 2"]
    assert message == [*first, "saved step_00000002", "end"]
    message.clear()
    run(tmp_path, *settings, callbacks, "checkpoint.resume=auto")
    assert message == ["a begin 2", "before 3", "after 3", "evaluated 3", "saved step_00000003", "end"]


def test_several_are_called_in_the_order_of_the_yaml(own_registry: None) -> None:
    message: list[int] = []

    @register("callback", "numbered")
    class Numbered(Callback):
        @dataclass
        class Config:
            number: int

        def on_step_begin(self, trainer: TrainingRun) -> None:
            message.append(self.config.number)

    config = tiny("train.callbacks=[{name: numbered, number: 2}, {name: numbered, number: 1}]")
    callbacks = Callbacks(config.train.callbacks)
    trainer: Any = type("OneRank", (), {"world": type("World", (), {"device": None})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megamoe.train.callbacks.raise_any_error_fast", lambda problem: None)
        callbacks.call("on_step_begin", trainer)
    assert message == [2, 1]


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        ("[minee]", r".*unknown callback 'minee'; did you mean 'mine'\?.*"),
        ("[{name: mine, evry: 2}]", r".*the callback 'mine' has no option 'evry'; did you mean 'every'\?.*"),
        ("[{name: mine, every: x}]", ".*every: expected a whole number, found 'x'.*"),
        ("[{every: 2}]", ".*expected the name of a callback, or `\{name: \.\.\.\}`.*"),
    ],
)
def test_options_are_checked_as_those_of_parts(own_registry: None, choice: str, line: str) -> None:
    @register("callback", "mine")
    class Mine(Callback):
        @dataclass
        class Config:
            every: int = 1

    with pytest.raises(UserError) as refused:
        tiny(f"train.callbacks={choice}")
    assert re.fullmatch(f"command line: train.callbacks.0{line}", str(refused.value)), str(refused.value)


MISTAKES = {
    "of a hook": (
        "    def on_step_end(self, trainer, metrics):\n        metrics['no such figure']\n",
        "train.callbacks: on_step_end of the callback 'mine' failed at line 9 of mine.py: "
        "KeyError: 'no such figure'",
    ),
    "of __init__": (
        "    def __init__(self, config):\n        self.rate = 1 / 0\n",
        "train.callbacks: the __init__ of 'mine' failed at line 9 of mine.py: ZeroDivisionError: "
        "division by zero",
    ),
    "a user's own": (
        "    def on_train_begin(self, trainer):\n        from megamoe.errors import UserError\n"
        "        raise UserError('no such table; make one')\n",
        "train.callbacks: on_train_begin of the callback 'mine': no such table; make one",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_the_run_in_one_line(own_registry: None, tmp_path: Path, case: str) -> None:
    """An earlier checkpoint is kept."""
    body, line = MISTAKES[case]
    (tmp_path / "mine.py").write_text(HEAD + body)
    plugin = (f"plugins=[{tmp_path}/mine.py]", f"output={tmp_path}", "evaluation.batches=0")
    with restored_process(), pytest.raises(UserError) as refused:
        train(load_config(None, [*BASE, *plugin, "train.callbacks=[mine]"]))
    assert str(refused.value) == line


def test_a_class_of_another_base_is_refused(own_registry: None) -> None:
    @register("callback", "other")
    class Other:
        @dataclass
        class Config:
            pass

    with pytest.raises(UserError, match="Other of the callback 'other' is no subclass of megamoe.train.call"):
        Callbacks(tiny("train.callbacks=[other]").train.callbacks)


def test_none_is_no_callback() -> None:
    assert tiny("train.callbacks=none").train.callbacks == tiny().train.callbacks == []


def test_the_example_writes_its_table(own_registry: None, tmp_path: Path, capsys: Any) -> None:
    small = ["train.steps=4", "optimizer.warmup_steps=0", "train.callbacks=[{name: router_norms, every: 2}]"]
    small += ["train.micro_batch_size=1"]
    small += ["data.sequence_length=16", "model.hidden_size=16", "moe.expert_ffn_hidden_size=16"]
    small += [f"output={tmp_path}", "evaluation={every: 2, batches: 1}", "log.report=false"]
    small += [f"parallel.deepspeed={ROOT}/ds_configs/zero3_fp32.json"]
    with restored_process():
        train(load_config(ROOT / "examples/own_callback.yaml", small))
    rows = [row.split(",") for row in (tmp_path / "own_callback/router_norms.csv").read_text().splitlines()]
    assert [row[:2] for row in rows] == [["2", "1"], ["2", "2"], ["4", "1"], ["4", "2"]]
    assert all(0 < float(norm) < 100 for _, _, norm in rows)
    assert "step 2: {'val/lm_loss':" in capsys.readouterr().out
    with pytest.raises(UserError, match="every is 0, expected at least 1"):
        load_config(ROOT / "examples/own_callback.yaml", ["train.callbacks=[{name: router_norms, every: 0}]"])


def test_the_example_of_monitoring_serves_metrics_and_names_stages(
    own_registry: None, tmp_path: Path
) -> None:
    """What Prometheus reads at the end of the run, and the stages in the trace of torch.profiler."""
    pages, port = [], free_port()

    @register("callback", "scrape")
    class Scrape(Callback):
        def on_train_end(self, trainer: TrainingRun) -> None:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                pages.append(answer.read().decode())

    small = [f"train.callbacks=[scrape, {{name: prometheus, port: {port}}}, ranges]", "train.steps=2"]
    small += ["optimizer.warmup_steps=0", "train.micro_batch_size=1", "data.sequence_length=16"]
    small += [
        "model.hidden_size=16",
        "moe.expert_ffn_hidden_size=16",
        f"output={tmp_path}",
        "log.report=false",
    ]
    small += ["train.profiler={start_step: 2, num_steps: 1}", "log.every=1"]
    with restored_process():
        train(load_config(ROOT / "examples/monitoring/monitored.yaml", small))
    metrics = json.loads((tmp_path / "monitored/metrics.jsonl").read_text().splitlines()[-1])
    loss, imbalance = metrics["train/lm_loss"], metrics["moe/layer_02/imbalance"]
    assert f'megamoe_train_lm_loss{{layer="",run="monitored"}} {loss}' in pages[0]
    assert f'megamoe_moe_layer_imbalance{{layer="02",run="monitored"}} {imbalance}' in pages[0]
    trace = (tmp_path / "monitored/profile/rank_00000.json").read_text()
    assert all(f'"name": "moe 2{stage}"' in trace for stage in ("", " router.scorer", " losses", " experts"))
    shown = json.loads((ROOT / "examples/monitoring/grafana.json").read_text())["panels"]
    drawn = {re.split("[{]", target["expr"])[0] for panel in shown for target in panel["targets"]}
    of_several_ranks = {"megamoe_perf_slowest_own_s", "megamoe_train_skipped_steps", "megamoe_perf_mfu"}
    assert all(f"{name}{{" in pages[0] for name in drawn - of_several_ranks)
