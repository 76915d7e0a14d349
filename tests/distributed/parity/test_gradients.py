"""The gradient of every parameter, experts too, against the training loss written down plainly."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.ranks.gradients import (
    Found,
    assert_same,
    gradients_of_the_engine,
    gradients_of_the_formula,
)
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place

TOLERANCE = 1e-5
# Biases, score functions and two MoE layers: every kind of parameter. No clipping: the gradient itself is
# compared.
RUN = {
    "model__num_attention_heads": 4,
    "model__num_layers": 3,
    "model__bias": True,
    "model__norm": "layernorm",
    "moe__layers": {"at": [2, 3]},
    "moe__shared_expert_mode": "gated",
    "optimizer__grad_clip": 0.0,
}

# (place, micro batches per data-parallel rank), and the ZeRO stage in `make test`.
LAYOUTS: dict[tuple[Place, int], int | None] = {
    (Place(1), 1): 0,
    (Place(1), 4): None,
    (Place(2), 4): None,
    (Place(2, expert=2), 2): 0,
    (Place(2, expert=2), 4): None,
    (Place(4, expert=2), 2): 1,
    (Place(4, expert=4), 1): None,
    (Place(2, expert_tensor=2), 4): None,
    (Place(2, tensor=2), 1): None,
    (Place(2, tensor=2, sequence=True), 4): None,
    (Place(2, tensor=2, expert=2, sequence=True), 1): None,
    (Place(2, tensor=2, expert_tensor=2), 4): None,
    (Place(4, tensor=4, sequence=True), 1): None,
    (Place(4, tensor=4, expert=2), 4): None,
    (Place(4, tensor=4, expert=4, sequence=True), 4): None,
    (Place(4, tensor=4, expert=2, expert_tensor=2, sequence=True), 1): None,
    (Place(4, tensor=4, expert_tensor=2), 1): None,
    (Place(4, tensor=2), 1): None,
    (Place(4, tensor=2, expert=2, sequence=True), 4): 2,
    (Place(4, tensor=2, expert=4), 4): None,
    (Place(4, tensor=2, expert=2, expert_tensor=2), 1): None,
    (Place(4, tensor=2, expert_tensor=2, sequence=True), 4): None,
    (Place(4, tensor=2, expert_tensor=4, sequence=True), 1): None,
}

QUICK = [(replace(place, zero=zero), number) for (place, number), zero in LAYOUTS.items() if zero is not None]
ALL = [(replace(place, zero=zero), number) for place, number in LAYOUTS for zero in (0, 1, 2)]


@cache
def formula(pool: Pool, batch_size: int) -> Found:
    ((found,),) = pool.run(gradients_of_the_formula, [(RUN, batch_size, 1)], ranks=1, timeout_s=600)
    assert any(".experts." in parameter for parameter in found["gradients"])
    for parameter, gradient in found["gradients"].items():
        assert gradient.abs().max() > 0, f"{parameter}: the test would see nothing"
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cases", [QUICK, pytest.param(ALL, marks=pytest.mark.full)], ids=["few", "all"])
def test_every_gradient_is_that_of_the_formula(
    pool: Pool, tmp_path: Path, cases: list[tuple[Place, int]], ranks: int
) -> None:
    these = [case for case in cases if case[0].ranks == ranks]
    sizes = [place.layout.data * accumulation for place, accumulation in these]
    runs = [
        {**RUN, "train__global_batch_size": size, **place.changes(tmp_path)}
        for (place, _), size in zip(these, sizes, strict=True)
    ]
    several = pool.run(gradients_of_the_engine, runs, ranks=ranks, timeout_s=900)
    for (place, accumulation), size, *found in zip(these, sizes, *several, strict=True):
        # Of the embedding, attention (2 weights, 1 bias) in three blocks, dense FFN (2 weights, 1 bias).
        assert len(found[0]["cuts"]) == 1 + 3 * 3 + 3
        try:
            assert_same(found, formula(pool, size), place.layout, TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{place}, accumulation {accumulation}: {error}") from None
