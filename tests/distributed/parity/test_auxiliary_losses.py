"""The gradient of every auxiliary loss, at its declared scope, under every layout and with recomputation."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megamoe import registry
from tests.support.moe.part_layers import moe_tree
from tests.support.ranks.gradients import (
    Found,
    assert_same,
    gradients_of_the_engine,
    gradients_of_the_formula,
)
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place

TOLERANCE = 1e-5
# Tensor parallelism adds up in another order. A scalar's gradient, a sum over all tokens that nearly cancel,
# shows it (cosine's temperature); grpo divides by the spread of a token's loss over its rollouts: a last bit
# of that loss moves its gradient by 4e-5.
TENSOR_TOLERANCE = 5e-5
WHERE_ROUNDING_SHOWS = {"grpo": 1e-3}
# A variant is a loss with options; by default each registered one has one.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in registry.list_parts("loss")}
VARIANTS |= {
    "switch_balance-sequence": ("switch_balance", {"scope": "sequence"}),
    "switch_balance-global_batch": ("switch_balance", {"scope": "global_batch"}),
    "clustering-mu": ("clustering", {"mu": 1.0}),
    "clustering-difference": ("clustering", {"mu": 1.0, "form": "difference"}),
}
# In `make test`: one of each way to take a mean, and of each input. test_parts.py trains with every loss.
QUICK = (
    *("switch_balance-sequence", "switch_balance-global_batch", "clustering-mu", "device_balance", "grpo"),
    *("relu_sparsity", "output_orthogonality", "expert_router_coupling", "z_loss"),
)
# (place, micro batches per data-parallel rank).
LAYOUTS = [
    (Place(1), 2),
    (Place(1, zero=1, recompute="full"), 2),
    (Place(2, zero=1, recompute="selective"), 4),
    (Place(2, expert=2, recompute="full"), 4),
    (Place(2, expert=2, zero=2), 1),
    (Place(4), 1),
    (Place(4, expert=2, zero=2, recompute="selective"), 1),
    (Place(4, expert=4, zero=1, recompute="full"), 1),
    (Place(4, expert=4), 1),
    (Place(4, expert=4, zero=1, recompute="selective"), 4),
    (Place(2, tensor=2), 4),
    (Place(2, tensor=2, expert_tensor=2, sequence=True, zero=2, recompute="full"), 2),
    (Place(4, tensor=2, expert=4, sequence=True, zero=1, recompute="full"), 2),
    (Place(4, tensor=2, expert=2, expert_tensor=2, recompute="selective"), 1),
    (Place(4, tensor=4, expert=2, sequence=True, zero=2), 4),
    (Place(4, tensor=4, expert_tensor=4, zero=1, recompute="full"), 1),
]


def run_with(loss: str, options: dict[str, Any]) -> dict[str, Any]:
    """A run with this loss, and a weight that shows."""
    tree = moe_tree("loss", loss)
    tree["losses"][loss] |= {"weight": 0.3, **options}
    if tree["router"]["capacity"]["name"] == "device":
        # It drops the lowest of scores that are equal but for rounding: the mock data repeat three words.
        tree["router"]["capacity"] = "none"
    return {
        **{f"moe__{key}": value for key, value in tree.items()},
        "model__num_attention_heads": 4,
        "moe__layers": {"at": [1, 2]},
        "optimizer__grad_clip": 0.0,
    }


RUNS = {variant: run_with(*choice) for variant, choice in VARIANTS.items()}


@cache
def formula(pool: Pool, variants: tuple[str, ...], batch_size: int, ranks: int) -> list[Found]:
    """Gradients of each run."""
    runs = [(RUNS[variant], batch_size, ranks) for variant in variants]
    found: list[Found]
    (found,) = pool.run(gradients_of_the_formula, runs, ranks=1, timeout_s=300)
    return found


def check(pool: Pool, folder: Path, place: Place, accumulation: int, variants: tuple[str, ...]) -> None:
    layout = place.layout
    changes = {"train__global_batch_size": layout.data * accumulation, **place.changes(folder)}
    runs = [{**RUNS[variant], **changes} for variant in variants]
    found = pool.run(gradients_of_the_engine, runs, ranks=place.ranks, timeout_s=300)
    right = formula(pool, variants, layout.data * accumulation, layout.data)
    for number, (variant, expected) in enumerate(zip(variants, right, strict=True)):
        tolerance = TOLERANCE
        if layout.tensor > 1:
            tolerance = WHERE_ROUNDING_SHOWS.get(variant, TENSOR_TOLERANCE)
        try:
            assert_same([rank[number] for rank in found], expected, layout, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{variant}: {error}") from None


def test_a_few_losses_at_one_layout(pool: Pool, tmp_path: Path) -> None:
    place = Place(2, tensor=2, expert_tensor=2, sequence=True, zero=2, recompute="full")
    check(pool, tmp_path, place, 2, QUICK)


@pytest.mark.full
@pytest.mark.parametrize(("place", "accumulation"), LAYOUTS, ids=str)
def test_the_gradient_of_every_loss_is_that_of_the_formula(
    pool: Pool, tmp_path: Path, place: Place, accumulation: int
) -> None:
    check(pool, tmp_path, place, accumulation, tuple(RUNS))


@pytest.mark.full
def test_the_losses_show_in_the_gradient(pool: Pool) -> None:
    """Otherwise the tests above would hold them to nothing."""
    without = [
        {**run, "moe__losses": {n: o for n, o in run["moe__losses"].items() if n != VARIANTS[variant][0]}}
        for variant, run in RUNS.items()
    ]
    several = [(run, 2, 1) for run in without]
    (bare,) = pool.run(gradients_of_the_formula, several, ranks=1, timeout_s=300)
    for variant, with_loss, without_loss in zip(RUNS, formula(pool, tuple(RUNS), 2, 1), bare, strict=True):
        names = [name for name in with_loss["gradients"] if ".router." in name]
        differences = [(with_loss["gradients"][n] - without_loss["gradients"][n]).abs().max() for n in names]
        sizes = [with_loss["gradients"][n].abs().max() for n in names]
        assert max(differences) > 1e-3 * max(sizes), variant
