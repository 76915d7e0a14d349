"""Gradients accumulate in fp32, and below ZeRO 2 they travel once a step of any number of micro batches."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from megamoe.train.trainer import Trainer
from tests.support.ranks.fp16 import with_fp16
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_config, ds_variant, small_run

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
MICRO_BATCHES = 16


def reductions_of_a_step(several: list[dict[str, Any]]) -> list[Counter[str]]:
    """Job: of each run's second step, how often each kind of reduction is called."""
    return [_reductions(**changes) for changes in several]


def _reductions(**changes: Any) -> Counter[str]:
    trainer = Trainer(small_run(**changes))
    trainer.step()
    called: Counter[str] = Counter()
    with mock.patch.multiple(dist, **{name: _counted(name, called) for name in REDUCTIONS}):
        trainer.step()
    trainer._stream.close()
    return called


def _counted(name: str, called: Counter[str]) -> Any:
    plain = getattr(dist, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        if dist.get_world_size(kwargs.get("group")) > 1:  # the loss asks its tensor-parallel group of one
            called[name] += 1
        return plain(*args, **kwargs)

    return count


def test_more_micro_batches_cost_no_more_reductions(pool: Pool) -> None:
    files = ("zero0_fp32", "zero0_bf16", "zero1_fp32", "zero1_bf16")
    runs = [
        {"parallel__expert": 2, "parallel__deepspeed": ds_config(file), "train__global_batch_size": size}
        for size in (2, 8)
        for file in files
    ]
    for found in pool.run(reductions_of_a_step, runs, ranks=2):
        for file, once, four_times in zip(files, found[: len(files)], found[len(files) :], strict=True):
            assert sum(once.values()) > 2, file  # more than the tokens' count and the record
            assert four_times == once, file


def accumulated(**changes: Any) -> float:
    """Job of one rank: how far the accumulated gradient is from the exact sum of the micro batches', relative
    to its largest value, the worst of all parameters."""
    with with_fp16():
        trainer = Trainer(small_run(**changes))
        engine = trainer.engine
        sums: dict[nn.Parameter, Tensor] = {}
        for parameter in engine.model.parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            sums[parameter] = torch.zeros(shape, dtype=torch.float64)
            parameter.register_hook(_adder(sums[parameter]))
        worst: list[float] = []
        step, scale = engine.step, engine.loss_scale

        def watched(lr: float, apply_update: bool = False, squares: float | None = None) -> float:
            for parameter, exact in sums.items():
                found = safe_get_full_grad(parameter)
                assert found is not None
                error = (found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9 * scale)
                worst.append(float(error))
            return step(lr, apply_update, squares)

        engine.step = watched  # type: ignore[method-assign]
        trainer.step()
        trainer.close()
    return max(worst)


def _adder(total: Tensor) -> Any:
    def add(gradient: Tensor) -> None:
        total.add_(gradient)

    return add


# ZeRO 1 and 2 have one path, and fp16 accumulates as bf16 does.
OTHERS = [pytest.param(file, marks=pytest.mark.full) for file in ("zero1_bf16", "zero2_fp16", "zero3_fp16")]


@pytest.mark.parametrize("file", ["zero2_bf16", "zero3_bf16", *OTHERS])
def test_gradients_accumulate_in_fp32(pool: Pool, tmp_path: Path, file: str) -> None:
    """The same in the model's own dtype is off by a hundred times as much, and shows here."""
    sections: dict[str, dict[str, Any]] = {"zero_optimization": CUT_ALL if "zero3" in file else {}}
    if "fp16" in file:
        sections["fp16"] = {"initial_scale_power": 8}
    path = ds_variant(tmp_path, file, **sections)
    run: dict[str, Any] = {"train__global_batch_size": MICRO_BATCHES, "parallel__deepspeed": path}
    assert pool.run(accumulated, **run, ranks=1)[0] < 1e-5


def test_that_test_can_fail(pool: Pool, tmp_path: Path) -> None:
    low = {"grad_accum_dtype": "bf16"}
    path = ds_variant(tmp_path, "zero3_bf16", zero_optimization=CUT_ALL, data_types=low)
    run: dict[str, Any] = {"train__global_batch_size": MICRO_BATCHES, "parallel__deepspeed": path}
    assert pool.run(accumulated, **run, ranks=1)[0] > 1e-4
