"""Sub-layers, expert dropout, inserted layers and recomputation: ranks that share experts train as one."""

from typing import Any

import pytest

from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import WORDS, assert_as_alone, ds_config, run_each

STEPS = 2
DROPOUT = {"moe__expert_output_dropout": 0.3, "moe__expert_activation_dropout": 0.2}
RUNS: dict[str, dict[str, Any]] = {
    "inserted sub-layers": {
        "moe__layers": {"insert_after": [1]},
        "moe__num_shared_experts": 0,
        "moe__expert_sublayers": 2,
        **DROPOUT,
    },
    "residual, sub-layers in place": {
        "moe__layers": {"at": [1, 2]},
        "moe__shared_expert_mode": "residual",
        "moe__expert_sublayers": 2,
        "model__norm": "layernorm",
        **DROPOUT,
    },
    "small start": {"model__init_scale": 0.1, "moe__layers": {"at": [2], "insert_after": [1]}},
}
# (ranks, expert-parallel size, ZeRO stage, recomputation)
LAYOUTS = [
    (2, 2, 1, "full"),
    pytest.param(4, 4, 2, "selective", marks=pytest.mark.full),
    pytest.param(2, 2, 0, "none", marks=pytest.mark.full),
]


def runs(**changes: Any) -> list[dict[str, Any]]:
    return [{"steps": STEPS, **run, "train__global_batch_size": 4, **changes} for run in RUNS.values()]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[dict[str, Any]]:
    (found,) = pool.run(run_each, runs(), ranks=1)
    return found


@pytest.mark.parametrize(("ranks", "expert", "stage", "recompute"), LAYOUTS)
def test_a_layout_trains_as_one_rank_does(
    pool: Pool, alone: list[dict[str, Any]], ranks: int, expert: int, stage: int, recompute: str
) -> None:
    several = runs(
        parallel__expert=expert,
        parallel__deepspeed=ds_config(f"zero{stage}_fp32"),
        model__recompute=recompute,
    )
    found = zip(*pool.run(run_each, several, ranks=ranks), strict=True)
    for name, each, expected in zip(RUNS, found, alone, strict=True):
        assert_as_alone(list(each), expected, name)


def test_collectives_of_a_loss_are_recomputed_in_the_same_order(pool: Pool) -> None:
    """The loss uses all ranks' tokens, in a separate collective."""
    losses = {"switch_balance": {"weight": 0.1, "scope": "global_batch"}}
    run = {**RUNS["inserted sub-layers"], "moe__losses": losses, "parallel__expert": 2}
    several = [
        {"steps": STEPS, **run, "train__global_batch_size": 4, "model__recompute": recompute}
        for recompute in ("none", "selective", "full")
    ]
    none, selective, full = pool.run(run_each, several, ranks=2)[0]
    for word in WORDS:
        assert selective[word] == pytest.approx(none[word], rel=1e-5)
        assert full[word] == pytest.approx(none[word], rel=1e-5)
