"""fp16 with loss scaling, on the CPU by PyTorch's half operations: on most of them DeepSpeed refuses it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.train.trainer import Trainer
from tests.support.ranks.fp16 import with_fp16
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_variant, run_steps, small_run

STEPS = 4
RUN: dict[str, Any] = {
    # The auxiliary gradient is most of the norm: it must be scaled as the loss is.
    "moe__losses": {"switch_balance": 20.0, "z_loss": 0.1},
    "moe__router": {"scorer": "linear", "score_function": {"name": "sigmoid", "bias_update": 0.25}},
    "train__global_batch_size": 4,
    "parallel__expert": 2,
}
Found = dict[str, list[Any]]


def scaled_steps(steps: int, save: bool = False, **changes: Any) -> Found:
    """Job: metrics of each step by name, and all weights and the score function's bias after it."""
    with with_fp16():
        trainer = Trainer(small_run(**changes))
        found: Found = {}
        for _ in range(steps):
            for name, value in trainer.step()[1].items():
                found.setdefault(name.removeprefix("train/"), []).append(value)
            found.setdefault("weights", []).append(_weights(trainer))
        if save:
            trainer.save()
        trainer.close()
    return found


def _weights(trainer: Trainer) -> list[torch.Tensor]:
    model = trainer.engine.model
    with trainer.engine.gathered(model.parameters()):
        return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


def _path(folder: Path, stage: int, **scale: int) -> str:
    zero = CUT_ALL if stage == 3 else {}
    return ds_variant(folder, f"zero{stage}_fp16", zero_optimization=zero, fp16=scale)


@pytest.fixture(scope="module")
def plain(pool: Pool) -> Found:
    """One rank, fp32."""
    (found,) = pool.run(run_steps, STEPS, **{**RUN, "parallel__expert": 1}, ranks=1)
    return found


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_trains_as_fp32_does(pool: Pool, plain: Found, tmp_path: Path, stage: int) -> None:
    path = _path(tmp_path, stage, initial_scale_power=12)
    for found in pool.run(scaled_steps, STEPS, **RUN, parallel__deepspeed=path, ranks=2):
        assert found["loss_scale"] == [2.0**12] * STEPS
        assert found["skipped_steps"] == [0] * STEPS
        for word, tolerance in (("lm_loss", 2e-3), ("loss", 2e-3), ("grad_norm", 1e-2)):
            assert found[word] == pytest.approx(plain[word], rel=tolerance), word
        assert {weight.dtype for weight in found["weights"][0]} >= {torch.float16}


@pytest.mark.parametrize("stage", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 3))])
def test_a_step_that_overflows_is_skipped_and_counted(pool: Pool, tmp_path: Path, stage: int) -> None:
    steps, power = 10, 19
    path = _path(tmp_path, stage, initial_scale_power=power, hysteresis=1)
    for found in pool.run(scaled_steps, steps, **RUN, parallel__deepspeed=path, ranks=2):
        applied = [value != float("inf") for value in found["grad_norm"]]
        assert not applied[0] and not applied[1] and any(applied)
        assert found["skipped_steps"] == [applied[: n + 1].count(False) for n in range(steps)]
        assert found["loss_scale"] == [2.0 ** (power - applied[:n].count(False)) for n in range(steps)]
        for number in range(1, steps):
            before, after = found["weights"][number - 1 : number + 1]
            same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            assert same is not applied[number]


@pytest.mark.full
def test_the_scale_is_resumed(pool: Pool, tmp_path: Path) -> None:
    """Unless it has become a static one, which is the file's and stays."""
    path = _path(tmp_path, 2, initial_scale_power=20, hysteresis=1)
    run = {**RUN, "parallel__deepspeed": path}
    whole = pool.run(scaled_steps, 8, **run, output=tmp_path / "whole", ranks=2)[0]
    cut = {**run, "output": tmp_path / "cut", "checkpoint__resume": "auto"}
    first = pool.run(scaled_steps, 4, True, **cut, ranks=2)[0]
    second = pool.run(scaled_steps, 4, **cut, ranks=2)[0]
    for word in ("lm_loss", "grad_norm", "loss_scale", "skipped_steps"):
        assert first[word] + second[word] == whole[word], word
    assert whole["skipped_steps"][3] == 4
    static = {**cut, "parallel__deepspeed": _path(tmp_path, 2, loss_scale=512)}
    found = pool.run(scaled_steps, 2, True, **static, ranks=2)[0]
    assert found["loss_scale"] == [512.0, 512.0]
    assert found["skipped_steps"] == [first["skipped_steps"][-1]] * 2
    dynamic = {**cut, "parallel__deepspeed": _path(tmp_path, 2, initial_scale_power=10)}
    assert pool.run(scaled_steps, 1, **dynamic, ranks=2)[0]["loss_scale"] == [1024.0]
