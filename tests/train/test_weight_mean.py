"""The exponential mean of the weights: by hand from each step's weights, resumed, and as a checkpoint."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megamoe.apps.checkpoints import describe
from megamoe.checkpoint.format.reader import MEAN, WEIGHT, CheckpointReader
from megamoe.optim.optimizers import WeightMean
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.train.loop import train
from megamoe.validation.deepspeed import deepspeed_problems
from tests.support.ranks.runs import ds_config
from tests.support.tiny import restored_process, tiny, tool

DECAY = 0.75
RUN = (
    *(f"optimizer.ema={DECAY}", "optimizer.lr=0.05", "train.global_batch_size=2", "evaluation.batches=0"),
    *("checkpoint.every=1", "checkpoint.keep=9", "moe.expert_ffn_hidden_size=16"),
)


def run(folder: Path, *overrides: str) -> None:
    with restored_process():
        train(tiny(*RUN, f"output={folder}", *overrides))


def saved(folder: Path, step: int, prefix: str) -> dict[str, Tensor]:
    with CheckpointReader(folder / f"run/checkpoints/step_{step:08}") as reader:
        return {name.removeprefix(prefix): reader.tensor(name) for name in reader.names(prefix)}


def means_by_hand(folder: Path, steps: int) -> dict[str, Tensor]:
    found = saved(folder, 1, WEIGHT)
    for step in range(2, steps + 1):
        for name, weight in saved(folder, step, WEIGHT).items():
            found[name] = DECAY * found[name].double() + (1 - DECAY) * weight.double()
    return found


@pytest.mark.parametrize(
    "file",
    ["zero3_fp32"]
    + [
        pytest.param(name, marks=pytest.mark.full)
        for name in ("zero0_bf16", "zero0_fp32", "zero1_bf16", "zero2_fp32", "zero3_bf16")
    ],
)
def test_the_mean_by_hand_and_after_a_resume(tmp_path: Path, file: str) -> None:
    precision = f"parallel.deepspeed={ds_config(file)}"
    run(tmp_path, precision)
    found, expected = saved(tmp_path, 4, MEAN), means_by_hand(tmp_path, 4)
    assert found and found.keys() <= expected.keys()  # the others are buffers
    assert "model.embedding.word_embeddings.weight" in found
    for name, mean in found.items():
        torch.testing.assert_close(mean.double(), expected[name].double(), rtol=1e-6, atol=1e-7, msg=name)
    moved = saved(tmp_path, 4, WEIGHT)
    assert any(not torch.allclose(mean, moved[name]) for name, mean in found.items())
    resume = f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000002"
    run(tmp_path / "resumed", precision, resume)
    again = saved(tmp_path / "resumed", 4, MEAN)
    assert all(torch.equal(again[name], mean) for name, mean in found.items())


def call(*arguments: str | Path) -> int:
    code: int = tool("checkpoint").main(["average", *map(str, arguments)])
    return code


def test_the_mean_as_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "train.steps=2")
    checkpoint, output = tmp_path / "run/checkpoints/step_00000002", tmp_path / "mean"
    assert call(checkpoint, output, "--ema") == 0
    assert describe.integrity_of(output) == describe.INTACT
    weights, means = saved(tmp_path, 2, WEIGHT), saved(tmp_path, 2, MEAN)
    with CheckpointReader(output) as reader:
        assert set(reader.names()) == {WEIGHT + name for name in weights}
        for name, weight in weights.items():
            assert torch.equal(reader.tensor(WEIGHT + name), means.get(name, weight))
    capsys.readouterr()
    for arguments, line in (
        ((output, tmp_path / "new", "--ema"), r".*mean: has no mean of the weights; .*"),
        ((tmp_path / "run", tmp_path / "new", "--ema"), r"--ema: found .*, expected .*"),
        ((checkpoint, tmp_path / "new", "--ema", "--last", "2"), r"--ema: .* leave out --last"),
    ):
        assert call(*arguments) == 2
        assert re.fullmatch(f"error: {line}\n", capsys.readouterr().err), line
    assert not (tmp_path / "new").exists()


def test_a_mean_of_masters_on_disk_is_refused() -> None:
    for key, found in (("optimizer.ema=0.9", True), ("optimizer.name=adamw", False)):
        config = tiny("parallel.deepspeed=ds.json", key)
        section = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
        plan = ParallelPlan.of(config, 1, {"zero_optimization": section})
        problems = [str(problem) for problem in deepspeed_problems(config, plan, None)]
        assert any("optimizer.ema keeps a mean of the weights in memory" in it for it in problems) == found


def test_the_mean_of_bf16_weights_moves() -> None:
    """A thousandth of a difference is below bf16's eight bits."""
    mean, weight = WeightMean(0.999), torch.full((1,), 0.02, dtype=torch.bfloat16)
    mean.update([weight])
    weight.fill_(0.03)
    for _ in range(5000):
        mean.update([weight])
    assert float(mean.of[weight]) == pytest.approx(0.03 - 0.01 * 0.999**5000, rel=2e-3)
