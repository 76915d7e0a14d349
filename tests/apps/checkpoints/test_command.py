"""tools/checkpoint.py: what it prints, and with which exit code it ends."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.folder import remove
from megamoe.config import dump_yaml, load_config, to_dict
from tests.support import checkpoint
from tests.support.checkpoint_files import seal
from tests.support.refusals import Case, cases
from tests.support.tiny import ROOT, tiny
from tests.support.tiny import tool as script

Told = tuple[int, str, str]  # exit code, stdout, stderr
Tool = Callable[..., Told]
Refused = Callable[..., str]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    def call(*arguments: str | Path) -> Told:
        capsys.readouterr()
        code = script("checkpoint").main([str(it) for it in arguments])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 7 and 8, of which 8 is damaged."""
    folder = tmp_path / "run" / "checkpoints"
    checkpoint.write(folder / "step_00000007")
    damaged = checkpoint.write(folder / "step_00000008", step=8) / "shard_00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (folder / "latest").write_text("step_00000008")
    return tmp_path / "run"


@pytest.fixture
def step(run: Path) -> Path:
    return run / "checkpoints" / "step_00000007"


def test_a_checkpoint_is_described(tool: Tool, step: Path) -> None:
    code, out, _ = tool("inspect", step)
    assert code == 0
    rows = dict(line.split(maxsplit=1) for line in out.splitlines()[1:])
    assert rows["step"] == "7; 448 tokens, 56 sequences"
    assert rows["parameters"] == "309, 192 of them in routed experts"
    assert rows["layout"] == "2 ranks: tensor 1, expert 2, expert_tensor 1; ZeRO 1, fp32"
    assert rows["saved"] == "2026-01-01T00:00:00+00:00"
    assert (rows["run"], rows["integrity"]) == ("by_hand", "intact")
    assert rows["files"] == "5, 0.0 MB"


def test_as_data(tool: Tool, step: Path) -> None:
    code, out, _ = tool("inspect", step, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["parameters"] == {"total": 309, "experts": 192}
    assert facts["bytes"] == sum(path.stat().st_size for path in step.iterdir())
    assert facts["integrity"] == "intact"


def test_a_run_is_a_table_and_the_one_that_a_resume_takes(tool: Tool, run: Path, step: Path) -> None:
    code, out, _ = tool("inspect", run)
    table, details = out.split("\n\n")
    assert code == 0
    assert table.splitlines()[1].startswith("* step_00000007 ")
    assert table.splitlines()[2].startswith("  step_00000008 ")
    assert "damaged: shard_00001.safetensors: damaged" in table.splitlines()[2]
    assert details.splitlines()[0] == str(step)
    _, out, _ = tool("inspect", run, "--json")
    assert [row["resume"] for row in json.loads(out)["checkpoints"]] == [True, False]
    assert json.loads(out)["resume"]["step"] == 7


def test_quick_reads_no_tensors(tool: Tool, run: Path) -> None:
    _, out, _ = tool("inspect", run, "--quick")
    assert "tensors not read" in out and "damaged" not in out
    assert out.splitlines()[2].startswith("* step_00000008")


def test_the_configuration_is_one_for_pretrain(tool: Tool, step: Path, tmp_path: Path) -> None:
    config = tiny("moe.router=deepseek_v3", "moe.num_shared_experts=1", "optimizer.lr=1e-5")
    meta = checkpoint.load(step / "checkpoint.json")
    checkpoint.dump(step / "checkpoint.json", {**meta, "config": to_dict(config)})
    seal(step)
    code, out, _ = tool("inspect", step, "--config")
    (tmp_path / "run.yaml").write_text(out)
    assert code == 0
    assert dump_yaml(load_config(tmp_path / "run.yaml")) == dump_yaml(config)


def test_what_a_configuration_names_is_not_run(tool: Tool, step: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "plugin.py").write_text(f"open({str(marker)!r}, 'w')")
    meta = checkpoint.load(step / "checkpoint.json")
    config = {
        "plugins": [str(tmp_path / "plugin.py")],
        "name": "a\x1b[2Jb",
        "x": "!!python/object/apply:os.abort []",
    }
    checkpoint.dump(step / "checkpoint.json", {**meta, "config": config})
    seal(step)
    for arguments in (["inspect", step], ["inspect", step, "--config"], ["verify", step]):
        exit_code, out, _ = tool(*arguments)
        assert exit_code == 0 and "\x1b" not in out
    assert yaml.safe_load(tool("inspect", step, "--config")[1]) == config
    assert tool("convert", step, tmp_path / "out", "--consolidated")[0] == 0
    assert not marker.exists()


def test_verify_reports_each_and_exits_with_1(tool: Tool, run: Path, step: Path) -> None:
    assert tool("verify", step) == (0, f"{step}: intact\n", "")
    code, out, _ = tool("verify", step, run)
    lines = out.splitlines()
    assert code == 1
    assert lines[:2] == [f"{step}: intact"] * 2
    assert lines[2].startswith(
        f"{step.with_name('step_00000008')}: damaged: shard_00001.safetensors: damaged, its"
    )
    (step / "notes").touch()
    os.truncate(step / "index.json", 100)
    code, out, _ = tool("verify", step)
    assert (code, out.count("\n")) == (1, 1)
    assert out.endswith("damaged: notes: not in SHA256SUMS (and 1 more)\n")


def test_weights_in_one_file(tool: Tool, step: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights"
    code, output, _ = tool("convert", step, out, "--consolidated", "--dtype", "bf16")
    assert code == 0 and output.startswith(f"{out}: 3 files; ")
    assert load_file(out / "model.safetensors")["up"].dtype is torch.bfloat16


@pytest.mark.parametrize("case", cases("checkpoints", "command: "))
def test_mistakes_are_one_line(
    refused: Refused, run: Path, step: Path, tmp_path: Path, case: Case, expect_message: Callable[..., None]
) -> None:
    names = {"STEP": step, "RUN": run, "OUT": tmp_path / "out"}
    expect_message(case, refused("checkpoint", *(names.get(it, it) for it in case["arguments"])))
    assert not (tmp_path / "out").exists() and len([*step.parent.iterdir()]) == 3


def test_a_damaged_description_is_one_line(refused: Refused, step: Path) -> None:
    (step / "checkpoint.json").write_text("{")
    assert "is not a complete checkpoint" in refused("checkpoint", "inspect", step)


def test_a_place_that_cannot_be_written(refused: Refused, step: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused("checkpoint", "convert", step, tmp_path / "file" / "out", "--consolidated")


def test_old_checkpoints_are_deleted(tool: Tool, run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step_00000007", run / "checkpoints" / "step_00000006")
    os.utime(run / "checkpoints" / "step_00000006" / "SHA256SUMS", (1, 1))
    os.utime(run / "checkpoints" / "step_00000006" / "checkpoint.json", (1, 1))
    code, dry, _ = tool("prune", run, "--keep", "1", "--dry-run")
    assert code == 0 and "would delete" in dry and "step_00000006 (old)" in dry
    code = tool("prune", run, "--keep", "1")[0]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert code == 0 and names == ["latest", "step_00000007", "step_00000008"]
    assert tool("prune", run, "--keep", "1", "--damaged")[0] == 0
    assert not (run / "checkpoints" / "step_00000008").exists()


@pytest.mark.full
def test_a_closed_pipe_and_a_quiet_start(run: Path) -> None:
    """`| head`: no traceback; and no word of any library."""
    step = run / "checkpoints" / "step_00000007"
    command = [sys.executable, str(ROOT / "tools/checkpoint.py"), "inspect", str(step), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        message = process.stderr.read()
    assert (message, process.returncode) == ("", 141)


@pytest.mark.parametrize("when", ["before its files are read", "between two files"])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_called_damaged(
    step: Path, tool: Tool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` and `inspect` beside a training run, which keeps the newest checkpoints alone."""
    problems = files.problems

    def removed(folder: Path, shares: int) -> Iterator[str]:
        if when.startswith("before"):
            remove(folder)
            yield from problems(folder, shares)
            return
        (folder / "shard_00001.safetensors").unlink()
        yield from problems(folder, shares)
        remove(folder)

    monkeypatch.setattr(files, "problems", removed)
    code, out, _ = tool("verify", step)
    assert (code, out) == (0, f"{step}: removed meanwhile\n")
