"""The gradient of every parameter, experts too, against the training loss written down plainly."""

from typing import Any

import pytest

from tests.distributed.gradients import Found, assert_same, gradients_of_the_engine, gradients_of_the_formula
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config

TOLERANCE = 1e-5
# Biases, gates and two MoE layers: every kind of parameter. No clipping: the gradient itself is compared.
RUN = {
    "model__num_layers": 3,
    "model__bias": True,
    "model__norm": "layernorm",
    "moe__layers": {"at": [2, 3]},
    "moe__shared_expert_mode": "gated",
    "optimizer__grad_clip": 0.0,
}

# (ranks, expert-parallel size, micro batches per rank), and the ZeRO stage that `make test` tries.
LAYOUTS = {(1, 1, 1): 0, (1, 1, 4): 1, (2, 1, 4): 1, (2, 2, 2): 0, (2, 2, 4): 2, (4, 2, 2): 1, (4, 4, 1): 2}
CASES = [
    pytest.param(
        *layout,
        stage,
        marks=() if stage == quick else pytest.mark.full,
        id="{} ranks, EP {}, accumulation {}, ZeRO {}".format(*layout, stage),
    )
    for layout, quick in LAYOUTS.items()
    for stage in (0, 1, 2)
]


@pytest.fixture(scope="module")
def formula(pool: Pool) -> Any:
    """Batch size -> gradients; each worked out once."""
    known: dict[int, Found] = {}

    def of(batch_size: int) -> Found:
        if batch_size not in known:
            ((known[batch_size],),) = pool.run(gradients_of_the_formula, [RUN], batch_size, 1, ranks=1)
        return known[batch_size]

    return of


@pytest.mark.parametrize(("ranks", "expert", "accumulation", "stage"), CASES)
def test_every_gradient_is_that_of_the_formula(
    pool: Pool, formula: Any, ranks: int, expert: int, accumulation: int, stage: int
) -> None:
    expected = formula(ranks * accumulation)
    changes = {
        **RUN,
        "train__global_batch_size": ranks * accumulation,
        "parallel__expert": expert,
        "parallel__deepspeed": ds_config(f"zero{stage}_fp32"),
    }
    found = [steps[0] for steps in pool.run(gradients_of_the_engine, [changes], ranks=ranks)]
    assert {name for name in expected["gradients"] if ".experts." in name}
    for name, gradient in expected["gradients"].items():
        assert gradient.abs().max() > 0, f"{name}: the test would see nothing"
    assert_same(found, expected, expert, TOLERANCE)
