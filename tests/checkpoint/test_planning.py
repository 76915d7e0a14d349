"""The plan of a save refuses chunks that overlap or leave a gap."""

import pytest
import torch

from megamoe.checkpoint.planning import plan_save
from megamoe.errors import UserError
from megamoe.parallel.chunks import Chunk, LocalChunk


def chunk(start: int, stop: int, name: str = "model/weight") -> LocalChunk:
    values = torch.empty(stop - start, 2, device="meta")
    return LocalChunk(name, (8, 2), Chunk((start, 0), (stop - start, 2)), values)


def test_chunks_must_fill_a_tensor_once(one_rank: None) -> None:
    plan = plan_save([chunk(0, 3), chunk(3, 8)])
    assert plan.own == {("model/weight", (0, 0)), ("model/weight", (3, 0))}
    with pytest.raises(UserError, match=r"key:model/weight has overlapping chunks.*at ZeRO stage 0$"):
        plan_save([chunk(0, 4), chunk(3, 8)])
