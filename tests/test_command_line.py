"""The command line: bad input ends with code 2 and one line, before ranks start and with nothing written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.config import dump_yaml
from tests.support.tiny import ROOT, tiny

Command = Callable[..., int]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of bytes, vocabulary 257: train.bin, train.idx, train.card.json."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": "to be or not to be"}) + "\n" for _ in range(40))
    )
    prepare(Preparation(str(folder / "train"), [str(folder / "text.jsonl")], progress=False))
    return folder


def reported(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_a_layout_that_does_not_fit_the_launched_ranks(
    refused_run: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    line = refused_run("parallel.expert=2")
    assert "parallel.expert: 2 does not divide the number of ranks 3; legal on 3 ranks" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_the_other_ranks_wait_for_the_message_of_the_first(
    pretrain: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends them meanwhile; if it does not, the first rank has not seen the mistake."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    told_before: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: told_before.append(capsys.readouterr().err))
    assert pretrain("model.num_attention_heads=3") == 2
    assert told_before == [""]
    assert "model.num_attention_heads 3" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_truncated_data(refused_run: Refused, corpus: Path, tmp_path: Path, ending: str) -> None:
    shutil.copytree(corpus, tmp_path / "data")
    path = tmp_path / "data" / f"train{ending}"
    os.truncate(path, path.stat().st_size - 3)
    line = refused_run("data.mock=false", "data.sources=[data/train]", "model.vocab_size=null")
    assert f"data/train{ending}' is truncated" in line and "prepare the data again" in line


def test_data_too_small_for_its_split(
    pretrain: Command, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known only once the ranks share the data; they part again."""
    sources = f"data.sources=[{corpus / 'train'}]"
    code = pretrain("data.mock=false", sources, "model.vocab_size=null", "data.sequence_length=100")
    assert code == 2
    assert "its valid split has 19 tokens (1 of 40 documents), one sample needs 101" in reported(capsys)
    assert not (tmp_path / "runs").exists()
    assert not dist.is_initialized()


PART = """
from dataclasses import dataclass
import torch
from megamoe.moe.part import Part
from megamoe.registry import register


@register("scorer", "{name}")
class Scorer(Part):
    @dataclass
    class Config:
        width: int = 1

    @classmethod
    def check(cls, options, moe, expert_parallel):
        {check}

    def __init__(self, config, dims):
        super().__init__(config, dims)
        self.weight_EH = torch.nn.Parameter(torch.zeros(dims.num_experts, dims.hidden_size))
        {init}

    def forward(self, hidden_TH, context):
        return hidden_TH @ self.weight_EH.T
"""
BAD_PARTS = {
    "scalar": (
        "pass",
        "self.heat = torch.nn.Parameter(torch.tensor(1.0))",
        "the scorer 'bad_scalar': heat is a parameter of shape []; a scalar needs shape [1]",
    ),
    "numbers": (
        "pass",
        "self.largest = float(self.weight_EH.detach().max())",
        "the __init__ of the scorer 'bad_numbers' failed at line 21 of numbers.py: RuntimeError: ",
    ),
    "broken": (
        "pass",
        "self.weight_EH = config.no_such",
        "the __init__ of the scorer 'bad_broken' failed at line 21 of broken.py: AttributeError: ",
    ),
    "check": (
        "options.width + 'a'",
        "pass",
        "moe.router.scorer: bad_check: its check failed at line 16 of check.py: TypeError: unsupported",
    ),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_plugin_whose_part_cannot_be_built(
    pretrain: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], own_registry: None, case: str
) -> None:
    check, init, message = BAD_PARTS[case]
    (tmp_path / f"{case}.py").write_text(PART.format(name=f"bad_{case}", check=check, init=init))
    assert pretrain(f"plugins=[{case}.py]", f"moe.router.scorer=bad_{case}") == 2
    line = reported(capsys)
    assert message in line
    assert ("; parts are also built on torch's meta device" in line) is (case == "numbers")
    assert not (tmp_path / "runs").exists()


def test_a_plugin_whose_part_fails_in_a_pass(
    pretrain: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], own_registry: None
) -> None:
    part = PART.format(name="narrow", check="pass", init="pass").replace("EH.T", "EH[:2].T")
    (tmp_path / "narrow.py").write_text(part)
    assert pretrain("plugins=[narrow.py]", "moe.router.scorer=narrow") == 2
    assert reported(capsys) == (
        "error: scorer 'narrow' (narrow.py): forward returned float32 [16, 2], expected float32 [16, 4] "
        "(tokens, experts)"
    )


def test_a_loss_that_occurs_twice_is_logged_under_each_key(pretrain: Command, tmp_path: Path) -> None:
    losses = "{near: {name: switch_balance, scope: sequence}, far: {name: switch_balance, weight: 0.5}}"
    assert pretrain("train.steps=1", f"moe.losses={losses}") == 0
    (row,) = map(json.loads, (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines())
    assert row["train/near"] != row["train/far"]
    auxiliary = 0.01 * row["train/near"] + 0.5 * row["train/far"]
    expected = row["train/lm_loss"] + 2 * auxiliary  # of the mean over the two layers
    assert row["train/loss"] == pytest.approx(expected, rel=1e-5)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_its_folder_and_its_checkpoint(
    pretrain: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A good run; then a second one in its folder, and checkpoints that do not fit, are refused untouched."""
    aligned = "moe.expert_ffn_hidden_size=16"  # for bf16 too
    assert pretrain("train.steps=1", "--local_rank=0", aligned) == 0
    assert "error" not in capsys.readouterr().err
    before = contents(tmp_path / "runs")
    refusals = {
        (): "run folder runs/a exists: add --resume to go on with it, overwrite=true to begin anew",
        ("--resume", "model.hidden_size=32"): "saved with model.hidden_size 16, this run has 32",
    }
    for arguments, message in refusals.items():
        assert pretrain(*arguments, aligned) == 2
        assert message in reported(capsys)
        assert contents(tmp_path / "runs") == before
    metrics = tmp_path / "runs/a/metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(b"nonsense\n" + whole)
    broken = contents(tmp_path / "runs")
    assert pretrain("--resume", "train.steps=2", aligned) == 2
    told = "runs/a/metrics.jsonl: line 1 is no record (a JSON object with an integer `step`): 'nonsense'"
    assert told in reported(capsys)
    assert contents(tmp_path / "runs") == broken
    metrics.write_bytes(whole + b'{"step": 2, "tr' + b"\0" * 100)  # as a power failure leaves it
    assert pretrain("--resume", "train.steps=2", aligned, "parallel.precision=bf16") == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [1, 2]
    assert pretrain("overwrite=true", "train.steps=1") == 0
    assert contents(tmp_path / "runs").keys() == before.keys()


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Nothing of the vendors comes before the line, and PyTorch's compiler is not imported for it."""
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny("output=runs", "moe.shared_expert_mode=residual")))
    done = subprocess.run(
        [sys.executable, "-X", "importtime", ROOT / "pretrain_gpt_moe.py", "--config", "run.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    imports: list[str] = []
    lines: list[str] = []
    for line in done.stderr.splitlines():
        (imports if line.startswith("import time:") else lines).append(line)
    expected = "error: moe.shared_expert_mode: found residual, but moe.num_shared_experts is 0; "
    expected += "leave it out, or set that to 1"
    assert (done.stdout, lines) == ("", [expected])
    modules = {line.rpartition("|")[2].strip() for line in imports}
    assert "megamoe.train.loop" in modules and "torch._dynamo.symbolic_convert" not in modules
    assert not (tmp_path / "runs").exists()
