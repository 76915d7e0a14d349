"""The routing metrics are the same on one rank and on four, under EP, TP and ZeRO 3."""

from pathlib import Path
from typing import Any

import pytest

from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, small_run

Rows = list[dict[str, Any]]
STEPS = 2
MODEL: dict[str, Any] = {
    "moe__layers": {"at": [1, 2]},
    "moe__router": {
        "scorer": {"name": "cosine", "routing_dim": 4},
        "score_function": {"name": "sigmoid", "bias_update": 0.01},
        "selector": {"name": "top_k", "k": 2},
        "capacity": {"name": "per_expert", "factor": 1.0},
    },
    "optimizer__eps": 1e-4,  # else the sign of a gradient of nearly 0 moves a weight by the learning rate
    "log": {"dead_window": 1},
}
QUICK = [Place(4, tensor=2, expert=2, zero=1, sequence=True, recompute="full")]
OTHERS = [
    Place(4, expert=4, zero=3),
    Place(4, zero=3),
    Place(4, tensor=2, zero=1),
    Place(4, expert=2, expert_tensor=2),
    Place(4, zero=2, recompute="selective"),
]
OF_RANKS = ("rank_load", "rank_imbalance", "rank_overload")


def metrics_of(runs: list[dict[str, Any]]) -> list[Rows]:
    """Job: the metrics of every step of each run."""
    found = []
    for changes in runs:
        trainer = Trainer(small_run(**{**MODEL, **changes}))
        found.append([trainer.step()[1] for _ in range(STEPS)])
        trainer.release()
    return found


def metrics_at(pool: Pool, places: list[Place], folder: Path) -> dict[Place, list[Rows]]:
    """Return each rank's metrics; all places have as many ranks."""
    runs = [place.changes(folder) for place in places]
    ranks = pool.run(metrics_of, runs, ranks=places[0].ranks, timeout_s=600)
    return {place: [rank[number] for rank in ranks] for number, place in enumerate(places)}


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return metrics_at(pool, [Place()], tmp_path_factory.mktemp("alone"))[Place()][0]


def assert_same(ranks: list[Rows], alone: Rows, expert_parallel: bool) -> None:
    for steps in ranks:
        for found, expected in zip(steps, alone, strict=True):
            of_ranks = {key for key in found if key.split("/")[-1] in OF_RANKS}
            assert bool(of_ranks) is expert_parallel
            ours = {key: found[key] for key in found.keys() - of_ranks if key.startswith(("moe/", "train/"))}
            theirs = {key: expected[key] for key in expected if key.startswith(("moe/", "train/"))}
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                if isinstance(value, list):
                    assert ours[key] == value, key
                else:
                    assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
            for key in of_ranks:
                if key.endswith("/rank_load"):
                    load = expected[key.replace("rank_load", "load")]
                    size = len(load) // len(found[key])
                    assert found[key] == [sum(load[at : at + size]) for at in range(0, len(load), size)]


def test_the_case_has_every_metric(alone: Rows) -> None:
    names = {key.split("/", 2)[2] for key in alone[-1] if key.startswith("moe/layer_02/")}
    assert {"scorer/temperature", "scorer/embedding_norm", "score_function/bias_range"} <= names
    assert "loss/z_loss" in names
    assert alone[-1]["moe/layer_02/score_function/bias_range"] > 0
    assert 0 < alone[-1]["moe/dropped"] < 1


@pytest.mark.parametrize(
    "places", [pytest.param(QUICK, id="quick"), pytest.param(OTHERS, id="others", marks=pytest.mark.full)]
)
def test_metrics_are_the_same_on_four_ranks(pool: Pool, alone: Rows, tmp_path: Path, places: Any) -> None:
    for place, ranks in metrics_at(pool, places, tmp_path).items():
        assert_same(ranks, alone, expert_parallel=place.expert > 1)
