"""Layers that differ (`moe.groups`) train as on one rank: at every layout, recomputed, replayed, resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, assert_as_alone, assert_moves, assert_same_to_the_bit, train_each

STEPS = 2
# Hash of 16 experts, a threshold over 64 small latent ones, top-2 of 8 and 4 identity experts with a bias
# that holds the mean number of those that compute. Two losses see the experts themselves.
RUN: dict[str, Any] = {
    "model__num_layers": 4,
    "moe__layers": {"every": 1},
    "moe__num_shared_experts": 0,
    "moe__zero_experts": {"identity": 4},
    "moe__router": {
        "scorer": {"name": "linear", "rows": True},
        "score_function": {"name": "softmax", "bias_update": 0.01, "mean_experts": 1.5},
        "selector": {"name": "top_k", "k": 2},
    },
    "moe__losses": {"switch_balance": 0.1, "expert_router_coupling": 0.1},
    "moe__groups": [
        {
            "layers": "first 1",
            "num_experts": 16,
            "expert_ffn_hidden_size": 16,
            "zero_experts": {},
            "router": "hash",
        },
        {
            "layers": [3],
            "num_experts": 64,
            "expert_ffn_hidden_size": 8,
            "latent_size": 16,
            "zero_experts": {},
            "num_shared_experts": 1,
            "router": {
                "scorer": {"name": "cosine"},
                "score_function": {"name": "softmax", "bias_update": 0.0, "mean_experts": None},
                "selector": {"name": "threshold", "threshold": 0.3},
            },
            "losses": {"switch_balance": 0.05, "z_loss": 0.01, "output_orthogonality": 0.1},
        },
    ],
    "train__global_batch_size": 4,
    "train__steps": STEPS,
}
BOTH = Place(4, tensor=2, expert=2)
PLACES = [
    *(Place(1, zero=zero) for zero in (1, 2, 3)),
    *(Place(2, expert=2, zero=zero) for zero in (0, 1, 2, 3)),
    *(replace(BOTH, zero=zero) for zero in (0, 1, 2, 3)),
    replace(BOTH, expert_tensor=2, sequence=True, zero=2, recompute="full"),
    Place(2, pipeline=2, zero=1),
    Place(4, pipeline=2, chunks=2, expert=2),
    Place(2, tensor=2, recompute="selective"),
]
QUICK = {Place(2, expert=2, zero=3), replace(BOTH, zero=1), Place(4, pipeline=2, chunks=2, expert=2)}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(trained, [{}], ranks=1)[0][0]


def trained(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: see `train_each`."""
    return train_each([{**RUN, **changes} for changes in runs], STEPS)


@pytest.mark.parametrize(
    "place", [it if it in QUICK else pytest.param(it, marks=pytest.mark.full) for it in PLACES], ids=str
)
def test_a_layout_trains_as_one_rank_does(
    pool: Pool, alone: dict[str, Any], tmp_path: Path, place: Place
) -> None:
    found = pool.run(trained, [place.changes(tmp_path)], ranks=place.ranks)
    ranks = [results[0] for results in found]
    assert_as_alone(ranks, alone, str(place))
    for rank in ranks:
        assert rank["history"] == alone["history"]


def test_every_layer_routes_by_its_own_group(alone: dict[str, Any]) -> None:
    """Experts and pairs of a token: 16 and 1, 8 and at most 2, 64 and 1 or more, 8 and at most 2."""
    load = alone["history"]["load"]
    assert [len(of_layer) for of_layer in load] == [16, 8, 64, 8]
    tokens = STEPS * 4 * 32
    assert sum(load[0]) == tokens < sum(load[2])
    assert all(tokens / 2 < sum(of_layer) < 2 * tokens for of_layer in (load[1], load[3]))
    layers = torch.cat(alone["chosen"])[:, 0].unique().tolist()
    assert layers == [1, 2, 3, 4]


@pytest.mark.full
def test_recomputed_replayed_and_resumed_runs_are_the_same_to_the_bit(
    pool: Pool, alone: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_to_the_bit(pool, trained, alone, tmp_path, RUN["moe__router"])


@pytest.mark.full
@pytest.mark.parametrize("target", [Place(1, zero=3), replace(BOTH, zero=2), Place(2, pipeline=2)], ids=str)
def test_a_checkpoint_moves_to_another_layout(
    pool: Pool, alone: dict[str, Any], tmp_path: Path, target: Place
) -> None:
    assert_moves(pool, trained, alone, tmp_path, target)
