"""The bytes of live tensors against `state_bytes`, between two micro batches of the second step.

Every tensor that the process holds is counted by its storage, so that what DeepSpeed keeps unseen is found.
Its buckets, and the random states and indices of the run itself, are few here: a model of many small layers.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.model.size import model_size
from megamoe.parallel.zero.costs import StateBytes
from megamoe.parallel.zero.engine import Engine
from megamoe.train.trainer import Trainer
from megamoe.validation.memory import states_of
from tests.support.ranks.fp16 import with_fp16
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_variant, small_run

TOLERANCE = 0.05
BUCKET = 40_000  # elements; the largest parameter has 32,768
MODEL: dict[str, Any] = {
    "data__sequence_length": 8,
    "model__num_attention_heads": 4,
    "model__num_layers": 8,
    "model__hidden_size": 64,
    "model__ffn_hidden_size": 64,
    "moe__expert_ffn_hidden_size": 64,
    "moe__num_experts": 4,
    "moe__layers": {"every": 1},
}
FILES = [
    *(f"zero{stage}_{precision}" for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")),
    *(f"zero{stage}_fp16" for stage in (1, 2, 3)),
    *(f"zero{stage}_bf16_offload" for stage in (1, 2, 3)),
]
# ranks, tensor, expert, expert_tensor
LAYOUTS = [
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (2, 1, 2, 1),
    (2, 2, 1, 1),
    (2, 2, 1, 2),
    (4, 1, 2, 1),
    (4, 1, 4, 1),
    (4, 2, 2, 1),
    (4, 2, 2, 2),
    (4, 4, 2, 1),
]
FAST = [*(((2, 1, 2, 1), file) for file in ("zero0_bf16", "zero2_bf16_offload"))]
CASES = [
    pytest.param(layout, file, marks=() if (layout, file) in FAST else pytest.mark.full)
    for layout in LAYOUTS
    for file in FILES
]


def counted(**changes: Any) -> tuple[float, StateBytes]:
    """Job: (bytes of all live tensors after the first micro batch of the second step, the formula's)."""
    with with_fp16():
        trainer = Trainer(small_run(**changes))
        trainer.step()
        found: list[float] = []
        backward = trainer.engine.backward

        def watched(loss: Tensor, last: bool, completes: bool | None = None) -> None:
            backward(loss, last, completes)
            found.append(_live_bytes(trainer.engine))

        trainer.engine.backward = watched  # type: ignore[method-assign]
        trainer.step()
        size = model_size(trainer.config, trainer.run.vocabulary.size)
        expected = states_of(trainer.config, trainer.run.plan, size)
        trainer.close()
    assert len(found) == 2
    return found[0], expected


def _live_bytes(engine: Engine) -> float:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    buckets = getattr(engine._engine.optimizer, "ipg_buckets", {}).values()
    buffers = [bucket.buffer for bucket in buckets]
    buffers = [part for buffer in buffers for part in (buffer if isinstance(buffer, list) else [buffer])]
    left_out = {buffer.untyped_storage().data_ptr() for buffer in buffers if buffer is not None}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in storages.items() if place not in left_out)


@pytest.mark.parametrize(("layout", "file"), CASES)
def test_the_formula_tells_what_is_held(pool: Pool, tmp_path: Path, layout: Any, file: str) -> None:
    """The start-up summary's figures, from the configuration alone."""
    ranks, tensor, expert, expert_tensor = layout
    zero = {"reduce_bucket_size": BUCKET}
    if file.startswith("zero3"):
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    # A scale at which the first step is not skipped: the optimiser has its moments from there on.
    scale = {"fp16": {"initial_scale_power": 8}} if "fp16" in file else {}
    path = ds_variant(tmp_path, file, zero_optimization=zero, **scale)
    sizes = {"tensor": tensor, "expert": expert, "expert_tensor": expert_tensor, "deepspeed": path}
    run = {**MODEL, "train__global_batch_size": 2 * ranks // tensor, "parallel": sizes}
    for held, formula in pool.run(counted, **run, ranks=ranks):
        assert held == pytest.approx(formula.total + formula.cpu, rel=TOLERANCE)
