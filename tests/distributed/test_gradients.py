"""The gradient of every parameter, experts too, against the training loss written down plainly."""

from typing import Any

import pytest

from megamoe.parallel.layout import Layout
from tests.distributed.gradients import Found, assert_same, gradients_of_the_engine, gradients_of_the_formula
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config

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

# (layout, sequence parallelism, micro batches per data-parallel rank), and the ZeRO stage in `make test`.
LAYOUTS: dict[tuple[Layout, bool, int], int | None] = {
    (Layout(1), False, 1): 0,
    (Layout(1), False, 4): 1,
    (Layout(2), False, 4): None,
    (Layout(2, expert=2), False, 2): 0,
    (Layout(2, expert=2), False, 4): None,
    (Layout(4, expert=2), False, 2): 1,
    (Layout(4, expert=4), False, 1): 2,
    (Layout(2, expert_tensor=2), False, 4): None,
    (Layout(2, tensor=2), False, 1): None,
    (Layout(2, tensor=2), True, 4): None,
    (Layout(2, tensor=2, expert=2), True, 1): None,
    (Layout(2, tensor=2, expert_tensor=2), False, 4): None,
    (Layout(4, tensor=4), True, 1): None,
    (Layout(4, tensor=4, expert=2), False, 4): None,
    (Layout(4, tensor=4, expert=4), True, 4): None,
    (Layout(4, tensor=4, expert=2, expert_tensor=2), True, 1): None,
    (Layout(4, tensor=4, expert_tensor=2), False, 1): None,
    (Layout(4, tensor=2), False, 1): None,
    (Layout(4, tensor=2, expert=2), True, 4): 2,
    (Layout(4, tensor=2, expert=4), False, 4): None,
    (Layout(4, tensor=2, expert=2, expert_tensor=2), False, 1): 1,
    (Layout(4, tensor=2, expert_tensor=2), True, 4): None,
    (Layout(4, tensor=2, expert_tensor=4), True, 1): None,
}


def _name(layout: Layout, sequence: bool, accumulation: int) -> str:
    sizes = f"TP {layout.tensor}, EP {layout.expert}, ETP {layout.expert_tensor}"
    return f"{layout.ranks} ranks, {sizes}{', SP' * sequence}, accumulation {accumulation}"


CASES = [
    pytest.param(
        *case,
        stage,
        marks=() if stage == quick else pytest.mark.full,
        id=f"{_name(*case)}, ZeRO {stage}",
    )
    for case, quick in LAYOUTS.items()
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


@pytest.mark.parametrize(("layout", "sequence", "accumulation", "stage"), CASES)
def test_every_gradient_is_that_of_the_formula(
    pool: Pool, formula: Any, layout: Layout, sequence: bool, accumulation: int, stage: int
) -> None:
    expected = formula(layout.data * accumulation)
    changes = {
        **RUN,
        "train__global_batch_size": layout.data * accumulation,
        "parallel__tensor": layout.tensor,
        "parallel__sequence": sequence,
        "parallel__expert": layout.expert,
        "parallel__expert_tensor": layout.expert_tensor,
        "parallel__deepspeed": ds_config(f"zero{stage}_fp32"),
    }
    found = [steps[0] for steps in pool.run(gradients_of_the_engine, [changes], ranks=layout.ranks)]
    assert {name for name in expected["gradients"] if ".experts." in name}
    # Of the embedding, attention (2 weights, 1 bias) in three blocks and the dense FFN (2 weights, 1 bias).
    assert len(found[0]["cuts"]) == 1 + 3 * 3 + 3
    for name, gradient in expected["gradients"].items():
        assert gradient.abs().max() > 0, f"{name}: the test would see nothing"
    assert_same(found, expected, layout, TOLERANCE)
