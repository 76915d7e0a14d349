"""The entry script under each launcher, as a user starts it: real processes, three steps."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megamoe.parallel.launch import free_port
from tests.checkpoint_files import read_index
from tests.distributed.runs import ROOT

STEPS = 3
RUN = """
name: launched
data: {mock: true, sequence_length: 16, workers: 0}
model: {num_layers: 1, hidden_size: 32, num_attention_heads: 2, vocab_size: 32}
moe: {layers: {every: 1}, num_experts: 4, router: {selector: {name: top_k, k: 2}}}
train: {steps: 3, global_batch_size: 2}
evaluation: {batches: 0}
log: {report: false}
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
TIMEOUT_S = 180


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """pretrain_gpt_moe.py and its arguments."""
    config = tmp_path / "run.yaml"
    config.write_text(RUN)
    return [str(ROOT / "pretrain_gpt_moe.py"), "--config", str(config), f"output={tmp_path}"]


def _environment(**more: str) -> dict[str, str]:
    """Ours, without what another launcher left; the devices are hidden."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**mine, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def _start(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, output


def _assert_trained(folder: Path, ranks: int) -> list[float]:
    """metrics.jsonl has the steps, once each, and a checkpoint has a file of every rank."""
    lines = (folder / "launched" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["tokens"] for step in steps] == [32, 64, 96]
    saved = folder / "launched" / "checkpoints" / f"step_{STEPS:08d}"
    assert len(list(saved.glob("shard_*.safetensors"))) == ranks
    return [step["train/lm_loss"] for step in steps]


@pytest.mark.full
def test_python_alone(script: list[str], tmp_path: Path) -> None:
    code, output = _finish(_start([sys.executable, *script], _environment(), tmp_path))
    assert code == 0, output
    _assert_trained(tmp_path, ranks=1)


def test_torchrun(script: list[str], tmp_path: Path) -> None:
    """The overrides of the command line apply: two ranks share the experts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port())]
    code, output = _finish(_start([*torchrun, *script, "parallel.expert=2"], _environment(), tmp_path))
    assert code == 0, output
    _assert_trained(tmp_path, ranks=2)
    saved = tmp_path / "launched" / "checkpoints" / f"step_{STEPS:08d}"
    meta = json.loads((saved / "checkpoint.json").read_text())
    assert (meta["layout"]["ranks"], meta["layout"]["expert"]) == (2, 2)
    tensors = read_index(saved)["tensors"]
    experts = [name for name in tensors if name.startswith("model/") and name.endswith("experts.up")]
    assert experts
    for name in experts:
        assert {shard for shard, *_ in tensors[name]["chunks"]} == {0, 1}


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="this launcher shows its ranks the devices again")
def test_the_deepspeed_launcher(script: list[str], tmp_path: Path) -> None:
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    deepspeed += ["--master_port", str(free_port())]
    environment = _environment(DS_ACCELERATOR="cpu")
    code, output = _finish(_start([*deepspeed, *script, "parallel.expert=2"], environment, tmp_path))
    assert code == 0, output
    _assert_trained(tmp_path, ranks=2)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="this launcher shows its ranks the devices again")
def test_the_deepspeed_launcher_with_a_hostfile(script: list[str], tmp_path: Path) -> None:
    """Two local ranks; --no_ssh takes only the number of ranks from the hostfile."""
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "--no_ssh"]
    deepspeed += ["--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    environment = _environment(DS_ACCELERATOR="cpu")
    code, output = _finish(_start([*deepspeed, *script, "parallel.expert=2"], environment, tmp_path))
    assert code == 0, output
    _assert_trained(tmp_path, ranks=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "programs", "line"),
    [
        ([], [], "FileNotFoundError: [Errno 2] No such file or directory: 'ssh'"),
        ([], ["ssh"], "host=node1.invalid was not reachable via ssh"),
        (["--no_ssh_check"], ["ssh"], "RuntimeError: launcher 'pdsh' not installed."),
    ],
)
def test_the_deepspeed_launcher_without_ssh_or_pdsh(
    option: list[str], programs: list[str], line: str, script: list[str], tmp_path: Path
) -> None:
    """It is DeepSpeed that tells: its last line is quoted in examples/slurm/README.md."""
    (tmp_path / "hostfile").write_text("node1.invalid slots=2\nnode2.invalid slots=2\n")
    (tmp_path / "bin").mkdir()
    for program in programs:
        (tmp_path / "bin" / program).write_text("#!/bin/sh\nexit 255\n")
        (tmp_path / "bin" / program).chmod(0o755)
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", *option]
    deepspeed += ["--master_addr", "127.0.0.1", "--no_local_rank"]
    environment = _environment(DS_ACCELERATOR="cpu", PATH=str(tmp_path / "bin"))
    started = time.monotonic()
    code, output = _finish(_start([*deepspeed, *script], environment, tmp_path))
    assert code != 0 and line in output.strip().splitlines()[-1], output
    assert time.monotonic() - started < 60


@pytest.mark.full
def test_srun(script: list[str], tmp_path: Path) -> None:
    """The variables that Slurm sets for two tasks of one node, and the two variables of examples/slurm."""
    port = str(free_port())
    processes = []
    for rank in ("0", "1"):
        slurm = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2"}
        environment = _environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **slurm)
        processes.append(_start([sys.executable, *script, "parallel.expert=2"], environment, tmp_path))
    for code, output in map(_finish, processes):
        assert code == 0, output
    _assert_trained(tmp_path, ranks=2)


@pytest.mark.full
def test_a_mistake_is_reported_once_and_ends_all_ranks(script: list[str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port())]
    code, output = _finish(_start([*torchrun, *script, "parallel.expert=3"], _environment(), tmp_path))
    assert code != 0
    assert output.count("error: parallel.expert: 3 does not divide the number of ranks 2") == 1
    assert not (tmp_path / "launched").exists()
