"""Causal attention by the compiled kernels on several ranks: the gradients of PyTorch's operators on one.

Over whole sequences, and over the documents in them with a window, sinks, biases and norms of all heads.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.gradients import assert_same, gradients_of_the_engine
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place

RUN: dict[str, Any] = {
    "model__num_attention_heads": 4,
    "optimizer__grad_clip": 0.0,
    "train__global_batch_size": 4,
}
VARIED = {"query_key_norm": "whole", "window": 5, "window_blocks": [2], "sinks": True, "input_bias": True}
# Place, key heads of four query heads, documents.
CASES: list[Any] = [
    (Place(recompute="full"), 2, True),
    (Place(2, tensor=2, sequence=True), 4, False),
    (Place(2, tensor=2, expert_tensor=2, recompute="full"), 4, True),
    (Place(2, tensor=2, sequence=True, recompute="selective"), 2, True),
]


@pytest.mark.parametrize(("place", "groups", "documents"), CASES, ids=str)
def test_gradients(pool: Pool, tmp_path: Path, place: Place, groups: int, documents: bool) -> None:
    run = {**RUN, "model__num_query_groups": groups, "data__document_aware": documents}
    if documents:
        run["model__attention"] = VARIED
    plain = {**run, **Place().changes(tmp_path), "model__cpu_kernels": "plain"}
    ((expected,),) = pool.run(gradients_of_the_engine, [plain], ranks=1)
    found = pool.run(gradients_of_the_engine, [{**run, **place.changes(tmp_path)}], ranks=place.ranks)
    assert_same([steps[0] for steps in found], expected, place.layout, 1e-5)
