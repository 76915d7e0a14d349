"""ZeRO-Infinity: optimiser and parameters on a disk, where DeepSpeed's async_io op can be built."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_variant, run_steps

# Tensors below 1 MiB stay in memory: the experts of this model are larger.
RUN: dict[str, Any] = {
    "model__hidden_size": 128,
    "moe__expert_ffn_hidden_size": 256,
    "train__global_batch_size": 4,
    "parallel__expert": 2,
}


def build_async_io() -> None:
    """Job: compile the op once; the ranks of a run would wait for one of them to do it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)


@pytest.mark.full
def test_it_trains_and_resumes_as_in_memory(pool: Pool, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io op cannot be built here: libaio is missing")
    pool.run(build_async_io, ranks=1, timeout_s=1200)
    disk = tmp_path / "disk"
    disk.mkdir()
    place = {"device": "nvme", "nvme_path": str(disk), "pin_memory": False}
    zero = {**CUT_ALL, "offload_optimizer": place, "offload_param": {**place, "buffer_size": 1_000_000}}
    path = ds_variant(tmp_path, "zero3_bf16_nvme", zero_optimization=zero)
    plain = ds_variant(tmp_path, "zero3_bf16_offload", zero_optimization=CUT_ALL)
    expected = pool.run(run_steps, 4, **RUN, parallel__deepspeed=plain, ranks=2)
    cut = {**RUN, "parallel__deepspeed": path, "output": tmp_path, "checkpoint__resume": "auto"}
    first = pool.run(run_steps, 2, True, **cut, ranks=2, timeout_s=300)
    assert any(file.stat().st_size >= 2**20 for file in disk.rglob("optimizer/**/*") if file.is_file())
    second = pool.run(run_steps, 2, True, **cut, ranks=2, timeout_s=300)
    for word in ("lm_loss", "grad_norm"):
        assert first[0][word] + second[0][word] == pytest.approx(expected[0][word], rel=1e-6)
