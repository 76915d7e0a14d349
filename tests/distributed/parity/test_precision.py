"""Every file of ds_configs/ trains, as close to plain fp32 as its precision allows."""

from typing import Any

import pytest

from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import PLAIN_FILES, ds_config, run_each, run_steps

STEPS = 2
BATCH = {"train__global_batch_size": 4}


def test_deepspeed_files_train(pool: Pool) -> None:
    """On two ranks, compared with one rank in fp32 without ZeRO."""
    (plain,) = pool.run(run_steps, STEPS, **BATCH, ranks=1)
    run = {"steps": STEPS, "parallel__expert": 2, **BATCH}
    runs = [{**run, "parallel__deepspeed": ds_config(file)} for file in PLAIN_FILES]
    ranks = pool.run(run_each, runs, ranks=2, timeout_s=600)
    for file, *found in zip(PLAIN_FILES, *ranks, strict=True):
        loss_tolerance, norm_tolerance = (1e-2, 3e-2) if "bf16" in file else (1e-5, 1e-5)
        for rank in found:
            assert rank["lm_loss"] == pytest.approx(plain["lm_loss"], rel=loss_tolerance), file
            assert rank["loss"] == pytest.approx(plain["loss"], rel=loss_tolerance), file
            assert rank["grad_norm"] == pytest.approx(plain["grad_norm"], rel=norm_tolerance), file
        if "bf16" in file:  # otherwise the file asked for nothing
            assert found[0]["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-6), file


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
def test_offload_follows_a_batch_that_grows(pool: Pool, stage: int) -> None:
    """DeepSpeed has a separate code path for offloaded gradients; here the batch grows from 1 to 4 micro
    batches.
    """
    ramp = {"start": 2, "increment": 6, "samples": 4}
    growth: dict[str, Any] = {"train__batch_rampup": ramp, "parallel__expert": 2}
    here, offloaded = (
        pool.run(run_steps, 4, parallel__deepspeed=ds_config(file), ranks=2, **growth)[0]
        for file in (f"zero{stage}_bf16", f"zero{stage}_bf16_offload")
    )
    assert offloaded["batch_size"] == [2, 2, 8, 8]
    assert offloaded["grad_norm"] == pytest.approx(here["grad_norm"], rel=3e-2)
    assert offloaded["lm_loss"] == pytest.approx(here["lm_loss"], rel=1e-2)
