"""Layers that differ (`moe.groups`), and routers that add the scores of the layer before, train as on one
rank: at every layout, between stages, recomputed, with two micro batches in flight, replayed, resumed.
"""

import functools
from collections.abc import Callable
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
GROUPS: dict[str, Any] = {
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
# Two chains: of 8 experts in blocks 1, 3 and 5, and of 4 with 2 identity experts in blocks 2 and 4. Block 6
# routes by a table.
CHAINS: dict[str, Any] = {
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
OF_GROUPS = [
    *(Place(1, zero=zero) for zero in (1, 2, 3)),
    *(Place(2, expert=2, zero=zero) for zero in (0, 1, 2, 3)),
    *(replace(BOTH, zero=zero) for zero in (0, 1, 2, 3)),
    replace(BOTH, expert_tensor=2, sequence=True, zero=2, recompute="full"),
    Place(2, pipeline=2, zero=1),
    Place(4, pipeline=2, chunks=2, expert=2),
    Place(2, tensor=2, recompute="selective"),
]
OF_CHAINS = [
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
QUICK = [
    *(("groups", place) for place in (Place(2, expert=2, zero=3), replace(BOTH, zero=1))),
    ("groups", Place(4, pipeline=2, chunks=2, expert=2)),
    *(("chains", place) for place in (replace(BOTH, sequence=True, zero=1, recompute="full"), STAGES)),
]
CASES = [("groups", place) for place in OF_GROUPS] + [("chains", place) for place in OF_CHAINS]
FURTHER = [Place(1, zero=3), replace(BOTH, zero=2), Place(2, pipeline=2)]
Alone = Callable[[str], dict[str, Any]]


def groups(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: GROUPS with each of these changes."""
    return train_each([{**GROUPS, **changes} for changes in runs], STEPS)


def chains(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: CHAINS with each of these changes."""
    return train_each([{**CHAINS, **changes} for changes in runs], STEPS)


JOBS = {"groups": groups, "chains": chains}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Alone:
    """What one rank shows of each of JOBS."""
    return functools.cache(lambda name: pool.run(JOBS[name], [{}], ranks=1)[0][0])


@pytest.mark.parametrize(
    ("name", "place"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
    ids=str,
)
def test_a_layout_trains_as_one_rank_does(
    pool: Pool, alone: Alone, tmp_path: Path, name: str, place: Place
) -> None:
    found = pool.run(JOBS[name], [place.changes(tmp_path)], ranks=place.ranks)
    ranks, expected = [results[0] for results in found], alone(name)
    assert_as_alone(ranks, expected, str(place))
    for rank in ranks:  # ZeRO 3 cuts the weights, and expert parallelism those of the experts
        assert name == "chains" or rank["history"] == expected["history"]
        for key, weight in rank["weights"].items():
            if key.endswith("residual.weight") and place.zero < 3:
                assert torch.allclose(weight, expected["weights"][key], rtol=1e-4, atol=1e-6), key


def test_every_layer_routes_by_its_own_group(alone: Alone) -> None:
    """Experts and pairs of a token: 16 and 1, 8 and at most 2, 64 and 1 or more, 8 and at most 2."""
    load = alone("groups")["history"]["load"]
    assert [len(of_layer) for of_layer in load] == [16, 8, 64, 8]
    tokens = STEPS * 4 * 32
    assert sum(load[0]) == tokens < sum(load[2])
    assert all(tokens / 2 < sum(of_layer) < 2 * tokens for of_layer in (load[1], load[3]))
    layers = torch.cat(alone("groups")["chosen"])[:, 0].unique().tolist()
    assert layers == [1, 2, 3, 4]


def test_it_makes_a_difference(pool: Pool, alone: Alone) -> None:
    """Where a layer follows another of its chain; its matrix learns, and that of the first one does not."""
    expected = alone("chains")
    router = {**CHAINS["moe__router"], "residual": "none"}
    (without,) = pool.run(chains, [{"moe__router": router}], ranks=1)[0]
    assert without["loss"][0] != expected["loss"][0]
    start = pool.run(chains, [{"optimizer__lr": 1e-12}], ranks=1)[0][0]
    learned = {
        name
        for name, weight in expected["weights"].items()
        if name.endswith("residual.weight")
        and not torch.allclose(weight, start["weights"][name], rtol=1e-3, atol=0)
    }
    blocks = {int(name.split(".layers.")[1].split(".")[0]) + 1 for name in learned}
    assert blocks == {3, 4, 5}


@pytest.mark.full
def test_multi_token_prediction_follows_the_last_block(pool: Pool, tmp_path: Path) -> None:
    """On one rank, and on the last stage of a pipeline, which gets the scores of the stage before."""
    changes = {"model__num_layers": 2, "moe__groups": [], "model__multi_token_prediction": {"depth": 1}}
    found = []
    for place in (Place(), Place(2, pipeline=2, zero=1, recompute="full")):
        runs = pool.run(chains, [{**changes, **place.changes(tmp_path)}], ranks=place.ranks)
        found.append([results[0] for results in runs])
    assert_as_alone(found[1], found[0][0])


@pytest.mark.full
@pytest.mark.parametrize("name", JOBS)
def test_recomputed_replayed_and_resumed_runs_are_the_same_to_the_bit(
    pool: Pool, alone: Alone, tmp_path: Path, name: str
) -> None:
    both: list[dict[str, Any]] = [{"model__recompute": ["norms", "moe"]}, {"train__in_flight": 2}]
    more = both if name == "chains" else []
    router = (GROUPS if name == "groups" else CHAINS)["moe__router"]
    assert_same_to_the_bit(pool, JOBS[name], alone(name), tmp_path, router, *more)


@pytest.mark.full
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("target", FURTHER, ids=str)
def test_a_checkpoint_moves_to_another_layout(
    pool: Pool, alone: Alone, tmp_path: Path, name: str, target: Place
) -> None:
    assert_moves(pool, JOBS[name], alone(name), tmp_path, target)
