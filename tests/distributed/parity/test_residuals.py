"""Routers that add the scores of the layer before train as on one rank: on every layout, between stages of a
pipeline, recomputed, with two micro batches in flight, replayed, resumed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, assert_as_alone, assert_moves, assert_same_to_the_bit, train_each

STEPS = 2
# Two chains: of 8 experts in blocks 1, 3 and 5, and of 4 with 2 identity experts in blocks 2 and 4. Block 6
# routes by a table.
RUN: dict[str, Any] = {
    "model__num_layers": 6,
    "moe__layers": {"every": 1},
    "moe__num_shared_experts": 0,
    "moe__router": {"residual": "gating", "selector": {"name": "top_k", "k": 2}},
    "moe__groups": [
        {
            "layers": [2, 4],
            "num_experts": 4,
            "zero_experts": {"identity": 2},
            "losses": {"heterogeneous_balance": 0.1},
        },
        {"layers": [6], "router": "hash"},
    ],
    "train__global_batch_size": 4,
    "train__steps": STEPS,
}
BOTH = Place(4, tensor=2, expert=2)
STAGES = Place(4, pipeline=2, chunks=3, expert=2)
PLACES = [
    *(Place(1, zero=zero, recompute="full") for zero in (1, 3)),
    *(Place(2, expert=2, zero=zero) for zero in (0, 1, 2, 3)),
    *(replace(BOTH, zero=zero) for zero in (0, 2, 3)),
    replace(BOTH, sequence=True, zero=1, recompute="full"),
    replace(BOTH, expert_tensor=2, sequence=True, zero=2, recompute="selective"),
    Place(2, pipeline=2),
    Place(2, pipeline=2, zero=1, recompute="full"),
    Place(4, pipeline=2, tensor=2),
    Place(4, pipeline=4, zero=1),
    Place(4, pipeline=2, context=2),
    STAGES,
]
QUICK = {replace(BOTH, sequence=True, zero=1, recompute="full"), STAGES}


def trained(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: see `train_each`."""
    return train_each([{**RUN, **changes} for changes in runs], STEPS)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(trained, [{}], ranks=1)[0][0]


@pytest.mark.parametrize(
    "place", [it if it in QUICK else pytest.param(it, marks=pytest.mark.full) for it in PLACES], ids=str
)
def test_a_layout_trains_as_one_rank_does(
    pool: Pool, alone: dict[str, Any], tmp_path: Path, place: Place
) -> None:
    found = pool.run(trained, [place.changes(tmp_path)], ranks=place.ranks)
    ranks = [results[0] for results in found]
    assert_as_alone(ranks, alone, str(place))
    for rank in ranks:  # ZeRO 3 cuts the weights, and expert parallelism those of the experts
        for name, weight in rank["weights"].items():
            if name.endswith("residual.weight") and place.zero < 3:
                assert torch.allclose(weight, alone["weights"][name], rtol=1e-4, atol=1e-6), name


def test_it_makes_a_difference(pool: Pool, alone: dict[str, Any]) -> None:
    """Where a layer follows another of its chain; its matrix learns, and that of the first one does not."""
    router = {**RUN["moe__router"], "residual": "none"}
    (without,) = pool.run(trained, [{"moe__router": router}], ranks=1)[0]
    assert without["loss"][0] != alone["loss"][0]
    start = pool.run(trained, [{"optimizer__lr": 1e-12}], ranks=1)[0][0]
    learned = {
        name
        for name, weight in alone["weights"].items()
        if name.endswith("residual.weight")
        and not torch.allclose(weight, start["weights"][name], rtol=1e-3, atol=0)
    }
    blocks = {int(name.split(".layers.")[1].split(".")[0]) + 1 for name in learned}
    assert blocks == {3, 4, 5}


@pytest.mark.full
def test_multi_token_prediction_follows_the_last_block(pool: Pool, tmp_path: Path) -> None:
    """On one rank, and on the last stage of a pipeline, which gets the scores of the stage before."""
    changes = {"model__num_layers": 2, "moe__groups": [], "moe__layers": {"at": [1]}}
    changes |= {"model__multi_token_prediction": {"depth": 1}, "moe__layers": {"every": 1}}
    found = []
    for place in (Place(), Place(2, pipeline=2, zero=1, recompute="full")):
        runs = pool.run(trained, [{**changes, **place.changes(tmp_path)}], ranks=place.ranks)
        found.append([results[0] for results in runs])
    assert_as_alone(found[1], found[0][0])


@pytest.mark.full
def test_recomputed_replayed_and_resumed_runs_are_the_same_to_the_bit(
    pool: Pool, alone: dict[str, Any], tmp_path: Path
) -> None:
    more = {"model__recompute": ["norms", "moe"]}, {"train__in_flight": 2}
    assert_same_to_the_bit(pool, trained, alone, tmp_path, RUN["moe__router"], *more)


@pytest.mark.full
@pytest.mark.parametrize("target", [Place(1, zero=3), replace(BOTH, zero=2), Place(2, pipeline=2)], ids=str)
def test_a_checkpoint_moves_to_another_layout(
    pool: Pool, alone: dict[str, Any], tmp_path: Path, target: Place
) -> None:
    assert_moves(pool, trained, alone, tmp_path, target)
