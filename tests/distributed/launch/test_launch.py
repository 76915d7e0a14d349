"""The entry script under each launcher, as a user starts it: real processes, three steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megamoe.parallel.launch import free_port
from tests.support.checkpoint_files import read_index
from tests.support.ranks.runs import ROOT

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
TIMEOUT_S = 400  # a start takes 25 s of CPU, and minutes on a busy machine


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """pretrain_gpt_moe.py and its arguments."""
    config = tmp_path / "run.yaml"
    config.write_text(RUN)
    return [str(ROOT / "pretrain_gpt_moe.py"), "--config", str(config), f"output={tmp_path}"]


def environment_of(**more: str) -> dict[str, str]:
    """Ours, without what another launcher left; the devices are hidden."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**mine, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def start(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, output


def assert_trained(folder: Path, ranks: int) -> list[float]:
    """metrics.jsonl has the steps, once each, and a checkpoint has a file of every rank."""
    lines = (folder / "launched" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["tokens"] for step in steps] == [32, 64, 96]
    saved = folder / "launched" / "checkpoints" / f"step_{STEPS:08d}"
    assert len(list(saved.glob("shard_*.safetensors"))) == ranks
    return [step["train/lm_loss"] for step in steps]


@pytest.mark.full
def test_torchrun(script: list[str], tmp_path: Path) -> None:
    """The overrides of the command line apply: two ranks share the experts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port())]
    code, output = finish(start([*torchrun, *script, "parallel.expert=2"], environment_of(), tmp_path))
    assert code == 0, output
    assert_trained(tmp_path, ranks=2)
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
    environment = environment_of(DS_ACCELERATOR="cpu")
    code, output = finish(start([*deepspeed, *script, "parallel.expert=2"], environment, tmp_path))
    assert code == 0, output
    assert_trained(tmp_path, ranks=2)


@pytest.mark.full
def test_srun(script: list[str], tmp_path: Path) -> None:
    """The variables that Slurm sets for two tasks of one node, and the two variables of examples/slurm."""
    port = str(free_port())
    processes = []
    for rank in ("0", "1"):
        slurm = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2"}
        environment = environment_of(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **slurm)
        processes.append(start([sys.executable, *script, "parallel.expert=2"], environment, tmp_path))
    for code, output in map(finish, processes):
        assert code == 0, output
    assert_trained(tmp_path, ranks=2)
