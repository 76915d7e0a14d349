"""The routing metrics are the same on one rank and on four, under EP, TP and ZeRO 3."""

from pathlib import Path
from typing import Any

import pytest

from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import CUT_ALL, ds_config, ds_variant, small_run

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
    "log": {"gradient_shares_every": 1, "dead_window": 1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "expert parallel": {"parallel__expert": 4, "parallel__deepspeed": "cut"},
    "tensor parallel": {
        "parallel": {"tensor": 2, "expert": 2, "sequence": True, "deepspeed": ds_config("zero1_fp32")},
        "model__recompute": "full",
    },
}
FURTHER: dict[str, dict[str, Any]] = {
    "zero 3": {"parallel__deepspeed": "cut"},
    "tensor parallel 2": {"parallel": {"tensor": 2, "deepspeed": ds_config("zero1_fp32")}},
    "expert tensor parallel": {"parallel": {"expert": 2, "expert_tensor": 2}},
    "zero 2, recomputed": {
        "parallel__deepspeed": ds_config("zero2_fp32"),
        "model__recompute": "selective",
    },
}
OF_RANKS = ("rank_load", "rank_imbalance", "rank_overload")


def metrics_of(layouts: dict[str, dict[str, Any]]) -> dict[str, Rows]:
    """Job: the metrics of every step under each layout."""
    found = {}
    try:
        for name, changes in layouts.items():
            trainer = Trainer(small_run(**{**MODEL, **changes}))
            found[name] = [trainer.step()[1] for _ in range(STEPS)]
            trainer._stream.close()
    finally:
        launch.stop()
    return found


def with_cut(folder: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    cut = ds_variant(folder, "zero3_fp32", zero_optimization=CUT_ALL)
    return {
        name: {key: cut if value == "cut" else value for key, value in changes.items()}
        for name, changes in layouts.items()
    }


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Rows:
    (found,) = pool.run(metrics_of, {"alone": {}}, ranks=1)
    rows: Rows = found["alone"]
    return rows


@pytest.fixture(scope="module")
def few(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Rows]]:
    layouts = with_cut(tmp_path_factory.mktemp("cut"), LAYOUTS)
    ranks: list[dict[str, Rows]] = pool.run(metrics_of, layouts, ranks=4)
    return ranks


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
    assert {"gradient_share/switch_balance", "gradient_share/z_loss", "loss/z_loss"} <= names
    assert alone[-1]["moe/layer_02/score_function/bias_range"] > 0
    assert 0 < alone[-1]["moe/layer_02/gradient_share/switch_balance"] < 1
    assert 0 < alone[-1]["moe/dropped"] < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_the_same_on_four_ranks(few: list[dict[str, Rows]], alone: Rows, layout: str) -> None:
    assert_same([rank[layout] for rank in few], alone, expert_parallel=True)


@pytest.mark.full
def test_metrics_are_the_same_under_further_layouts(pool: Pool, alone: Rows, tmp_path: Path) -> None:
    found = pool.run(metrics_of, with_cut(tmp_path, FURTHER), ranks=4, timeout_s=600)
    for layout in FURTHER:
        expert_parallel = layout == "expert tensor parallel"
        assert_same([rank[layout] for rank in found], alone, expert_parallel)
