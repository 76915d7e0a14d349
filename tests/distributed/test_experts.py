"""Sub-layers, expert dropout, inserted layers and recomputation: ranks that share experts train as one."""

from typing import Any

import pytest
import torch

from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config, in_order, recorded_steps, small_run

STEPS = 3
TOLERANCE = 1e-5
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
    (4, 4, 2, "selective"),
    pytest.param(2, 2, 0, "none", marks=pytest.mark.full),
]


def run_all(**changes: Any) -> dict[str, Any]:
    """Job: what each step of each run showed on this rank."""
    try:
        return {
            name: recorded_steps(Trainer(small_run(**run, train__global_batch_size=4, **changes)), STEPS)
            for name, run in RUNS.items()
        }
    finally:
        launch.stop()


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    (found,) = pool.run(run_all, ranks=1)
    return found


@pytest.mark.parametrize(("ranks", "expert", "stage", "recompute"), LAYOUTS)
def test_a_layout_trains_as_one_rank_does(
    pool: Pool, alone: dict[str, Any], ranks: int, expert: int, stage: int, recompute: str
) -> None:
    found = pool.run(
        run_all,
        parallel__expert=expert,
        parallel__deepspeed=ds_config(f"zero{stage}_fp32"),
        model__recompute=recompute,
        ranks=ranks,
    )
    for name, expected in alone.items():
        for step in range(STEPS):
            # Recomputed, a router is asked twice; what it says twice is the same.
            together = in_order([rank[name]["chosen"][step] for rank in found]).unique(dim=0)
            assert torch.equal(together, in_order([expected["chosen"][step]])), f"{name}, step {step + 1}"
        for word in ("lm_loss", "loss", "grad_norm"):
            for rank in found:
                assert rank[name][word] == pytest.approx(expected[word], rel=TOLERANCE), (name, word)


def one_run(**changes: Any) -> dict[str, Any]:
    """Job: a run whose loss uses all ranks' tokens, in a separate collective."""
    losses = {"switch_balance": {"weight": 0.1, "scope": "global_batch"}}
    run = {**RUNS["inserted sub-layers"], "moe__losses": losses, "parallel__expert": 2, **changes}
    try:
        return recorded_steps(Trainer(small_run(**run, train__global_batch_size=4)), STEPS)
    finally:
        launch.stop()


def test_collectives_of_a_loss_are_recomputed_in_the_same_order(pool: Pool) -> None:
    none, selective, full = (
        pool.run(one_run, model__recompute=recompute, ranks=2)[0]
        for recompute in ("none", "selective", "full")
    )
    for word in ("lm_loss", "loss", "grad_norm"):
        assert selective[word] == pytest.approx(none[word], rel=TOLERANCE)
        assert full[word] == pytest.approx(none[word], rel=TOLERANCE)
