"""At ZeRO 3 nothing holds on to a weight that was gathered, once its module has computed."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import model_inputs
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_variant, small_run


def held_after_forward(**changes: Any) -> dict[str, bool]:
    """Job: of each weight, whether what was gathered for the forward pass is still in memory after it."""
    trainer = Trainer(small_run(**changes, train__global_batch_size=2))
    trainer.step()
    gathered: dict[str, StorageWeakRef] = {}
    for name, module in trainer.engine.model.named_modules():

        def note(module: nn.Module, inputs: Any, name: str = name) -> None:
            for own, weight in module.named_parameters(recurse=False):
                gathered[f"{name}.{own}"] = StorageWeakRef(weight.untyped_storage())

        module.register_forward_pre_hook(note)
    batch = next(trainer._stream)
    trainer.context.batch = micro_batch_of(batch, 0)
    losses_BS = trainer.engine.forward(label_smoothing=0.0, **model_inputs(batch))
    held = {name: not storage.expired() for name, storage in gathered.items()}
    del losses_BS  # and with it the graph, which must have lived until here
    trainer.release()
    return held


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_weights_are_whole_while_their_module_computes(pool: Pool, tmp_path: Path, recompute: str) -> None:
    path = ds_variant(tmp_path, "zero3_fp32", zero_optimization=CUT_ALL)
    layers = {"at": [1, 2]}
    for held in pool.run(
        held_after_forward, parallel__deepspeed=path, model__recompute=recompute, moe__layers=layers, ranks=2
    ):
        assert sum(".experts." in name or ".shared." in name for name in held) == 8
        assert not [name for name, is_held in held.items() if is_held]
