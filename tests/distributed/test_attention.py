"""Causal attention by the compiled kernels on several ranks: the gradients of PyTorch's operators on one.

Over whole sequences, and over the documents in them with a window, sinks, biases and norms of all heads.
"""

from typing import Any

import pytest

from megamoe.parallel.layout import Layout
from tests.distributed.gradients import assert_same, gradients_of_the_engine
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config

RUN: dict[str, Any] = {
    "model__num_attention_heads": 4,
    "optimizer__grad_clip": 0.0,
    "train__global_batch_size": 4,
    "parallel__deepspeed": ds_config("zero0_fp32"),
}
VARIED = {"query_key_norm": "whole", "window": 5, "window_blocks": [2], "sinks": True, "input_bias": True}
# Layout, sequence parallelism, key heads of four query heads, recomputation, documents.
CASES: list[Any] = [
    (Layout(1), False, 2, "full", True),
    (Layout(2, tensor=2), True, 4, "none", False),
    (Layout(2, tensor=2, expert_tensor=2), False, 4, "full", True),
    (Layout(2, tensor=2), True, 2, "selective", True),
]
OTHERS = [
    (Layout(1), False, 4, "none", False),
    (Layout(1), False, 2, "full", False),
    (Layout(2, tensor=2, expert_tensor=2), False, 4, "full", False),
    (Layout(2, tensor=2), True, 2, "selective", False),
]
CASES += [pytest.param(*case, marks=pytest.mark.full) for case in OTHERS]


@pytest.mark.parametrize(("layout", "sequence", "groups", "recompute", "documents"), CASES, ids=str)
def test_gradients(
    pool: Pool, layout: Layout, sequence: bool, groups: int, recompute: str, documents: bool
) -> None:
    run = {**RUN, "model__num_query_groups": groups, "data__document_aware": documents}
    if documents:
        run["model__attention"] = VARIED
    ((expected,),) = pool.run(gradients_of_the_engine, [{**run, "model__cpu_kernels": "plain"}], ranks=1)
    changes = {
        **run,
        "parallel__tensor": layout.tensor,
        "parallel__expert_tensor": layout.expert_tensor,
        "parallel__sequence": sequence,
        "model__recompute": recompute,
    }
    found = [steps[0] for steps in pool.run(gradients_of_the_engine, [changes], ranks=layout.ranks)]
    assert_same(found, expected, layout, 1e-5)
