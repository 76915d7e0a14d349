"""The gradient of every auxiliary loss, at its declared scope, under every layout and with recomputation."""

from dataclasses import astuple
from typing import Any

import pytest

from megamoe import registry
from megamoe.parallel.layout import Layout
from tests.distributed.gradients import Found, assert_same, gradients_of_the_engine, gradients_of_the_formula
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config
from tests.moe.part_layers import moe_tree

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
# (layout, sequence parallelism, micro batches per data-parallel rank, recomputation, ZeRO stage); True: in
# `make test`.
LAYOUTS = {
    (Layout(1), False, 2, "none", 0): True,
    (Layout(1), False, 2, "full", 1): False,
    (Layout(2), False, 4, "selective", 1): False,
    (Layout(2, expert=2), False, 4, "full", 0): False,
    (Layout(2, expert=2), False, 1, "none", 2): True,
    (Layout(4), False, 1, "none", 0): False,
    (Layout(4, expert=2), False, 1, "selective", 2): False,
    (Layout(4, expert=4), False, 1, "full", 1): False,
    (Layout(4, expert=4), False, 1, "none", 0): False,
    (Layout(4, expert=4), False, 4, "selective", 1): False,
    (Layout(2, tensor=2), False, 4, "none", 0): False,
    (Layout(2, tensor=2, expert_tensor=2), True, 2, "full", 2): True,
    (Layout(4, tensor=2, expert=4), True, 2, "full", 1): False,
    (Layout(4, tensor=2, expert=2, expert_tensor=2), False, 1, "selective", 0): False,
    (Layout(4, tensor=4, expert=2), True, 4, "none", 2): False,
    (Layout(4, tensor=4, expert_tensor=4), False, 1, "full", 1): False,
}
CASES = [
    pytest.param(
        *case,
        marks=() if quick else pytest.mark.full,
        id="{} ranks, TP {}, EP {}, ETP {}, SP {}, accumulation {}, recompute {}, ZeRO {}".format(
            *astuple(case[0]), *case[1:]
        ),
    )
    for case, quick in LAYOUTS.items()
]


def run_with(loss: str, options: dict[str, Any]) -> dict[str, Any]:
    """A run with this loss, and a weight that shows."""
    tree = moe_tree("loss", loss)
    tree["losses"][loss] |= {"weight": 0.3, **options}
    return {
        **{f"moe__{key}": value for key, value in tree.items()},
        "model__num_attention_heads": 4,
        "moe__layers": {"at": [1, 2]},
        "optimizer__grad_clip": 0.0,
    }


RUNS = {variant: run_with(*choice) for variant, choice in VARIANTS.items()}


@pytest.fixture(scope="module")
def formula(pool: Pool) -> Any:
    """(batch size, ranks) -> gradients of each run; each worked out once."""
    known: dict[tuple[int, int], list[Found]] = {}

    def of(batch_size: int, ranks: int) -> list[Found]:
        key = (batch_size, ranks)
        if key not in known:
            runs = list(RUNS.values())
            (known[key],) = pool.run(gradients_of_the_formula, runs, *key, ranks=1, timeout_s=300)
        return known[key]

    return of


@pytest.mark.parametrize(("layout", "sequence", "accumulation", "recompute", "stage"), CASES)
def test_the_gradient_of_every_loss_is_that_of_the_formula(
    pool: Pool, formula: Any, layout: Layout, sequence: bool, accumulation: int, recompute: str, stage: int
) -> None:
    changes = {
        "train__global_batch_size": layout.data * accumulation,
        "parallel__tensor": layout.tensor,
        "parallel__sequence": sequence,
        "parallel__expert": layout.expert,
        "parallel__expert_tensor": layout.expert_tensor,
        "parallel__deepspeed": ds_config(f"zero{stage}_fp32"),
        "model__recompute": recompute,
    }
    runs = [{**run, **changes} for run in RUNS.values()]
    found = pool.run(gradients_of_the_engine, runs, ranks=layout.ranks, timeout_s=300)
    right = formula(layout.data * accumulation, layout.data)
    for place, (variant, expected) in enumerate(zip(RUNS, right, strict=True)):
        tolerance = TOLERANCE
        if layout.tensor > 1:
            tolerance = WHERE_ROUNDING_SHOWS.get(variant, TENSOR_TOLERANCE)
        try:
            assert_same([rank[place] for rank in found], expected, layout, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{variant}: {error}") from None


def test_the_losses_show_in_the_gradient(formula: Any, pool: Pool) -> None:
    """Otherwise the tests above would hold them to nothing."""
    without = [
        {**run, "moe__losses": {n: o for n, o in run["moe__losses"].items() if n != VARIANTS[variant][0]}}
        for variant, run in RUNS.items()
    ]
    (bare,) = pool.run(gradients_of_the_formula, without, 2, 1, ranks=1, timeout_s=300)
    for variant, with_loss, without_loss in zip(RUNS, formula(2, 1), bare, strict=True):
        names = [name for name in with_loss["gradients"] if ".router." in name]
        differences = [(with_loss["gradients"][n] - without_loss["gradients"][n]).abs().max() for n in names]
        sizes = [with_loss["gradients"][n].abs().max() for n in names]
        assert max(differences) > 1e-3 * max(sizes), variant
