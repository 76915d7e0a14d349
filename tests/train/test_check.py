"""`--check`: every problem of a configuration at once, on one process, without training."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.config import to_dict
from megamoe.train.command import main
from tests.support.checkpoint_files import write_checkpoint
from tests.support.tiny import ROOT, VOCABULARY, tiny

Tool = Callable[..., int]
WRONG = (
    "parallel.expert=3",
    "parallel.deepspeed=ds.json",
    "model.attention_dropout=0.1",
    "model.attention.sinks=true",
    "moe.router.selector.k=5",
    "optimizer.min_lr=1",
    "model.gpu_kernels=triton",
    "data={mock: false, sources: [nowhere/text]}",
)


@pytest.fixture
def keys(pretrain: Tool, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Call --check on a configuration that cannot run; returns the key of each line."""

    def call(*arguments: str) -> list[str]:
        assert pretrain("--check", *arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and all(line.startswith("error: ") for line in err.splitlines()), err
        return [line.split(": ")[1] for line in err.splitlines()]

    return call


def test_problems_of_all_topics_are_told_at_once(
    keys: Callable[..., list[str]], pretrain: Tool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 9, "optimizer": {}})
    )
    found = keys(*WRONG)
    at_once = ["optimizer.min_lr", "data 'nowhere/text'"]  # without torch
    later = ["model.attention.sinks", "parallel.expert", "moe.router.selector", "model.gpu_kernels"]
    assert found == [*at_once, *later, "ds.json", "ds.json"]
    assert pretrain(*WRONG) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {found[0]}: ")


def test_a_file_that_cannot_be_read_hides_no_other_problem(keys: Callable[..., list[str]]) -> None:
    assert keys("parallel.deepspeed=missing.json", "parallel.expert=3", "train.global_batch_size=7") == [
        "parallel.deepspeed",
        "parallel.expert",
        "train.global_batch_size",
    ]


def test_a_problem_that_the_first_look_alone_tells(keys: Callable[..., list[str]]) -> None:
    assert keys("checkpoint.remote=s3:/bucket") == ["checkpoint.remote"]


def test_the_memory_is_computed_for_what_is_right_otherwise(keys: Callable[..., list[str]]) -> None:
    large = ("model.hidden_size=65536", "model.num_layers=1000")
    assert keys(*large) == ["memory"]
    assert keys(*large, "optimizer.min_lr=1") == ["optimizer.min_lr"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "on 1 rank (data 1, tensor 1, expert 1 x 1), ZeRO 0, fp32, 4 steps"),
        (
            ["parallel.tensor=2", "parallel.expert=4"],
            "on 4 ranks (data 2, tensor 2, expert 4 x 1), ZeRO 0, fp32, 4 steps",
        ),
        (
            ["--ranks", "6", "parallel.tensor=2"],
            "on 6 ranks (data 3, tensor 2, expert 1 x 1), ZeRO 0, fp32, 4 steps",
        ),
    ],
)
def test_a_run_that_can_start(
    pretrain: Tool, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], expected: str
) -> None:
    before = sorted(tmp_path.iterdir())
    assert pretrain("--check", *arguments) == 0
    assert capsys.readouterr().out == f"valid: run.yaml {expected}\n"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("start", ["checkpoint.resume", "checkpoint.init.path"])
def test_another_models_checkpoint_is_told(
    pretrain: Tool, capsys: pytest.CaptureFixture[str], tmp_path: Path, start: str
) -> None:
    """And what a resume would change."""
    config = to_dict(tiny("moe.layers=none"))
    saved = write_checkpoint(tmp_path / "other/step_1", {}, vocabulary=VOCABULARY, config=config)
    arguments = ["--check", f"{start}={saved}", "moe.layers=none"]
    assert pretrain(*arguments, "model.logit_scale=2") == 2
    assert f"error: {saved}: saved with model.logit_scale 1.0, " in capsys.readouterr().err
    if start == "checkpoint.resume":
        assert pretrain(*arguments, "optimizer.lr=1") == 0
        assert "changed since the checkpoint: optimizer.lr" in capsys.readouterr().out


def test_differences_are_told(pretrain: Tool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Those of a base, and then the file's own."""
    text = (tmp_path / "run.yaml").read_text().replace("differences: []", 'differences: ["b: 2", "c: 3"]')
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text('base: base.yaml\ndifferences: ["c: 3", "a: 1"]')
    assert pretrain("--check") == 0
    told = ["differences from the published model:", "  b: 2", "  c: 3", "  a: 1"]
    assert capsys.readouterr().out.splitlines()[1:] == told


def test_the_ranks_of_launcher_count(keys: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert keys("parallel.expert=2") == ["parallel.expert"]
    assert keys("--ranks", "5", "parallel.tensor=2") == ["parallel.tensor"]


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["parallel.expert=1000000"]])
def test_numbers_of_ranks_that_nobody_has(keys: Callable[..., list[str]], arguments: list[str]) -> None:
    assert keys(*arguments) == ["--ranks"]


def test_ranks_are_for_a_check_alone(pretrain: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain("--ranks", "2") == 2
    assert capsys.readouterr().err == "error: --ranks: found 2, which is for --check alone; leave it out\n"


def test_a_key_that_is_unknown_comes_first(keys: Callable[..., list[str]]) -> None:
    assert keys("model.hidden_sizes=3", "optimizer.min_lr=1") == ["command line"]


def test_the_output_in_the_docs(
    restored_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/site/configuration.md").read_text(encoding="utf-8").replace("\\\n", " ")
    shown = re.findall(r"^\$ python pretrain_gpt_moe\.py (.*)\n((?:(?:error|valid): .*\n)+)", page, re.M)
    assert len(shown) == 2
    for command, output in shown:
        main(command.split())
        assert "".join(capsys.readouterr()) == output
