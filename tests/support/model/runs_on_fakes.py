"""Whole runs on two ranks with fake versions of Transformer Engine and Apex; see `check_fakes`."""

import tempfile
from typing import Any

import torch

from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.support.model.with_fakes import calls, pretend_cuda
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, recorded_steps, small_run


def run_all(runs: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """Job of one rank: two steps and a checkpoint of each run, one after the other in the same world."""
    pretend_cuda()
    results = []
    for changes in runs:
        calls()
        trainer = Trainer(small_run(**changes))
        results.append(recorded_steps(trainer, 2))
        trainer.save()
        results[-1]["products"] = [type(call.module).__name__ for call in calls()]
    launch.stop()
    return results


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float, steps: slice) -> None:
    for word in ("lm_loss", "loss", "grad_norm"):
        mine, theirs = torch.tensor(found[word]), torch.tensor(expected[word][steps])
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0)


def check_runs_of_two_ranks() -> None:
    """From one backend to the other, there and back, and in FP8."""
    plain = {"model__backend": "torch", "model__norm_kernel": "torch"}
    engine = {"model__backend": "transformer_engine"}
    fp8 = {**engine, "model__fp8": "delayed"}
    with tempfile.TemporaryDirectory() as folder:
        common = {"output": folder, "parallel__expert": 2, "checkpoint__resume": "auto"}
        fp32 = {**common, "parallel__deepspeed": ds_config("zero1_fp32")}
        bf16 = {**common, "parallel__deepspeed": ds_config("zero2_bf16")}
        runs = [
            {"name": "plain", **fp32, **plain},
            {"name": "plain", **fp32, **plain},
            {"name": "there", **fp32, **plain},
            {"name": "there", **fp32, **engine},
            {"name": "back", **fp32, **engine},
            {"name": "back", **fp32, **plain},
            {"name": "bf16", **bf16, **plain},
            {"name": "fp8", **bf16, **fp8},
            {"name": "again", **bf16, **fp8, "model__recompute": "full"},
        ]
        for first, second, *changed, bf16_run, in_fp8, recomputed in Pool().run(run_all, runs, ranks=2):
            whole = {word: first[word] + second[word] for word in first}
            for number, run in enumerate(changed):
                assert_same(run, whole, 1e-5, slice(2, 4) if number % 2 else slice(0, 2))
            # Two products of the experts' layer in each of two steps of four micro batches.
            products = [run["products"].count("GroupedLinear") for run in changed]
            assert products == [0, 2 * 2 * 4, 2 * 2 * 4, 0], products
            assert_same(in_fp8, bf16_run, 0.02, slice(0, 2))
            assert_same(recomputed, in_fp8, 1e-6, slice(0, 2))
            assert recomputed["products"].count("GroupedLinear") == 2 * 2 * 2 * 4
