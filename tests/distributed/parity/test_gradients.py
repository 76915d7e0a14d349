"""The gradient of every parameter, experts too, against the training loss written down plainly."""

from dataclasses import replace

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


Case = tuple[Place, int]
QUICK = [(replace(place, zero=zero), number) for (place, number), zero in LAYOUTS.items() if zero is not None]
ALL: list[Case] = [(replace(place, zero=zero), number) for place, number in LAYOUTS for zero in (0, 1, 2)]


def name(case: Case) -> str:
    return f"{case[0]}, accumulation {case[1]}"


def asked_for(request: pytest.FixtureRequest) -> list[Case]:
    """The cases of the selected tests."""
    selected = {item.name for item in request.session.items}
    return [case for case in ALL if any(f"[{name(case)}]" in item for item in selected)]


def batch_size(case: Case) -> int:
    return case[0].layout.data * case[1]


@pytest.fixture(scope="module")
def formula(pool: Pool, request: pytest.FixtureRequest) -> dict[int, Found]:
    """Gradients by batch size."""
    sizes = sorted({batch_size(case) for case in asked_for(request)})
    (found,) = pool.run(gradients_of_the_formula, [(RUN, size, 1) for size in sizes], ranks=1, timeout_s=600)
    return dict(zip(sizes, found, strict=True))


@pytest.fixture(scope="module")
def engines(
    pool: Pool, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, list[Found]]:
    """What each rank found in each case."""
    found: dict[Case, list[Found]] = {}
    asked = asked_for(request)
    for ranks in sorted({case[0].ranks for case in asked}):
        cases = [case for case in asked if case[0].ranks == ranks]
        folder = tmp_path_factory.mktemp("ds")
        runs = [{**RUN, "train__global_batch_size": batch_size(c), **c[0].changes(folder)} for c in cases]
        by_rank = pool.run(gradients_of_the_engine, runs, ranks=ranks, timeout_s=900)
        found |= dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.full, id=name(case)) for case in ALL],
)
def test_every_gradient_is_that_of_the_formula(
    engines: dict[Case, list[Found]], formula: dict[int, Found], case: Case
) -> None:
    found, expected = engines[case], formula[batch_size(case)]
    assert any(".experts." in parameter for parameter in expected["gradients"])
    # Of the embedding, attention (2 weights, 1 bias) in three blocks and the dense FFN (2 weights, 1 bias).
    assert len(found[0]["cuts"]) == 1 + 3 * 3 + 3
    for parameter, gradient in expected["gradients"].items():
        assert gradient.abs().max() > 0, f"{parameter}: the test would see nothing"
    assert_same(found, expected, case[0].layout, TOLERANCE)
