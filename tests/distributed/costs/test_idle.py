"""How long pipeline stages wait, with blocks that sleep: as long as the simulated clock says."""

import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megamoe.model.moe_block import Block
from megamoe.parallel.pipeline.links import StageLinks
from megamoe.train.step import Passes
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

FORWARD_S = 0.06  # of a stage's part; the backward pass takes twice as long


class Sleep(Function):
    """Takes time, in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * FORWARD_S)
        return gradients[0]


def waited(stages: int, chunks: int, micro_batches: int) -> tuple[float, float]:
    """Job: (seconds from the first pass of a step to this stage's last one, seconds waited for receives)."""
    block, receive, finish, begin = Block.forward, StageLinks._receive, Passes.finish, Passes.__init__
    times = {"waited": 0.0, "begin": 0.0, "end": 0.0}

    def sleeping(self: Block, *args: Any, **kwargs: Any) -> Any:
        hidden, context = block(self, *args, **kwargs)
        return (hidden, context) if self.passed_over else (Sleep.apply(hidden), context)

    def receiving(self: StageLinks, *args: Any) -> Tensor:
        started = time.monotonic()
        tensor = receive(self, *args)
        times["waited"] += time.monotonic() - started
        return tensor

    def beginning(self: Passes, *args: Any) -> None:
        begin(self, *args)
        dist.barrier()
        times.update(waited=0.0, begin=time.monotonic())

    def finishing(self: Passes) -> None:
        times["end"] = time.monotonic()
        finish(self)

    config = small_run(
        parallel__pipeline=stages,
        parallel__pipeline_chunks=chunks,
        model__num_layers=stages * chunks,
        model__tie_embeddings=False,
        moe__layers={"at": [1]},
        train__global_batch_size=micro_batches,
        train__micro_batch_size=1,
    )
    with (
        mock.patch.object(Block, "forward", sleeping),
        mock.patch.object(StageLinks, "_receive", receiving),
        mock.patch.multiple(Passes, __init__=beginning, finish=finishing),
    ):
        trainer = Trainer(config)
        for _ in range(2):  # the first one also prepares
            trainer.step()
        trainer.release()
    return times["end"] - times["begin"], times["waited"]


@pytest.mark.full  # another load on the machine would show as waiting
@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 1, 4), (2, 2, 4), (4, 1, 8)])
def test_idle_share_of_sleeping_blocks(pool: Pool, stages: int, chunks: int, micro_batches: int) -> None:
    """(p - 1) / (v m + p - 1), within 0.03."""
    found = pool.run(waited, stages, chunks, micro_batches, ranks=stages)
    total = max(seconds for seconds, _ in found)
    idle = sum(total - (seconds - waits) for seconds, waits in found) / (stages * total)
    assert idle == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1), abs=0.03)
