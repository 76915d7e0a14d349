"""The metrics of the MoE layers by hand, and what is kept over the steps of a run."""

from typing import Any

import pytest
import torch

from megamoe.train.routing_metrics import RoutingHistory, routing_metrics
from megamoe.train.step_record import LayerRecord


def layer_of(load: list[int], wanted: list[int] | None = None, **more: Any) -> LayerRecord:
    width = more.pop("width", [0, sum(load), 0, 0, 0])
    return LayerRecord(torch.tensor(load), torch.tensor(wanted or load), torch.tensor(width), **more)


LAYERS = {
    1: layer_of(
        [6, 2, 0, 0],
        [8, 2, 0, 0],
        width=[1, 2, 3, 0, 0],
        entropy=3.0,
        top_1=4.5,
        losses={"z_loss": 0.5},
        part_metrics={"scorer/temperature": 0.3},
    ),
    # With two more experts, which compute nothing.
    12: layer_of([2, 2, 2, 2], width=[0, 8, 0, 0, 0, 0, 0], entropy=2.0, top_1=8.0, losses={"z_loss": 1.0}),
}


def history_of(*steps: dict[int, LayerRecord], window: int = 2) -> RoutingHistory:
    history = RoutingHistory([4, 4], window=window)
    for layers in steps:
        history.update(layers)
    return history


def test_a_step_by_hand() -> None:
    earlier = {1: layer_of([0, 4, 4, 0]), 12: layer_of([8, 0, 0, 0])}
    metrics = routing_metrics(LAYERS, 2, history_of(earlier, LAYERS), expert_ranks=2)
    lists = {key: metrics.pop(key) for key in list(metrics) if isinstance(metrics[key], list)}
    assert lists == {
        "moe/layer_01/load": [6, 2, 0, 0],
        "moe/layer_01/width_histogram": [1, 2, 3],
        "moe/layer_01/rank_load": [8, 0],
        "moe/layer_12/load": [2, 2, 2, 2],
        "moe/layer_12/width_histogram": [0, 8],
        "moe/layer_12/rank_load": [4, 4],
    }
    first = {
        "imbalance": 3.0,  # the largest, 6, over the mean, 2
        "max_vio": 2.0,
        "load_cv": 6**0.5 / 2,  # deviations 4, 0, -2, -2: a variance of 6
        "dropped": 0.2,  # 8 of 10 were computed
        "max_vio_run": 0.5,  # 6, 6, 4, 0 in both steps
        "dead": 1,  # the last had nothing in two steps
        "experts_per_token": 8 / 6,
        "gate_entropy": 0.5,
        "top1_prob": 0.75,
        "rank_imbalance": 2.0,
        "rank_overload": 0.5,  # 4 of 8 pairs
    }
    second = {
        **dict.fromkeys(("max_vio", "load_cv", "dropped", "dead", "rank_overload"), 0.0),
        **dict.fromkeys(("imbalance", "experts_per_token", "rank_imbalance", "top1_prob"), 1.0),
        "max_vio_run": 1.5,  # 10 of a mean of 4
        "gate_entropy": 0.25,
    }
    means = {name: (first[name] + second[name]) / (1 if name == "dead" else 2) for name in first}
    assert metrics == pytest.approx(
        {
            **{f"moe/layer_01/{name}": value for name, value in first.items()},
            **{f"moe/layer_12/{name}": value for name, value in second.items()},
            **{f"moe/{name}": value for name, value in means.items()},
            "moe/layer_01/loss/z_loss": 0.25,
            "moe/layer_12/loss/z_loss": 0.5,
            "moe/layer_01/scorer/temperature": 0.3,
        }
    )


def test_one_rank_has_no_metrics_of_ranks_and_a_dense_model_none() -> None:
    metrics = routing_metrics(LAYERS, 2, history_of(LAYERS), expert_ranks=1)
    assert not [key for key in metrics if "rank" in key]
    assert routing_metrics({}, 2, RoutingHistory([], 2), expert_ranks=1) == {}


def test_a_step_without_any_pair_gives_zeros() -> None:
    nothing = {1: layer_of([0, 0, 0, 0]), 12: layer_of([0, 0, 0, 0])}
    metrics = routing_metrics(nothing, 1, history_of(nothing), expert_ranks=4)
    numbers = {value for key, value in metrics.items() if not isinstance(value, list)}
    assert numbers == {0.0}


def test_an_expert_is_dead_after_a_window_without_a_pair_and_lives_again() -> None:
    used, unused = layer_of([1, 1, 1, 1]), layer_of([1, 1, 1, 0])
    history = history_of(window=2)
    found = []
    for layer in (unused, unused, unused, used, unused, unused):
        history.update({1: layer, 12: used})
        found.append(history.dead()[0].tolist())
    assert found == [[0, 0], [1, 0], [1, 0], [0, 0], [0, 0], [1, 0]]


def test_the_history_goes_on_from_its_state() -> None:
    straight, saved = history_of(LAYERS, LAYERS, LAYERS), history_of(LAYERS)
    resumed = RoutingHistory([4, 4], window=2)
    resumed.restore(saved.state())
    resumed.update(LAYERS)
    resumed.update(LAYERS)
    assert resumed.state() == straight.state() and resumed.steps == 3
    for other in ({}, RoutingHistory([4], window=2).state()):
        resumed.restore(other)
        assert resumed.state() == straight.state(), "a checkpoint of an earlier version changes nothing"


def test_a_dense_model_goes_on_from_a_checkpoint_without_a_history() -> None:
    history = RoutingHistory([], window=2)
    history.restore({})
    assert history.steps == 0


def test_layers_of_several_sizes_have_the_metrics_of_layers_alone() -> None:
    """Layers 1 and 12 have 4 experts, layer 5 between them has 2: nobody's numbers change."""
    of_two = layer_of([3, 1], width=[0, 4, 0], entropy=1.0, top_1=2.0)
    layers = {1: LAYERS[1], 5: of_two, 12: LAYERS[12]}
    history = RoutingHistory([4, 2, 4], window=2)
    history.update(layers)
    metrics = routing_metrics(layers, 2, history, expert_ranks=2)
    alone = RoutingHistory([2], window=2)
    alone.update({5: of_two})
    for expected in (
        routing_metrics(LAYERS, 2, history_of(LAYERS), expert_ranks=2),
        routing_metrics({5: of_two}, 2, alone, expert_ranks=2),
    ):
        of_layers = {key: value for key, value in expected.items() if "/layer_" in key}
        assert {key: metrics[key] for key in of_layers} == of_layers
    assert metrics["moe/imbalance"] == pytest.approx((3.0 + 1.5 + 1.0) / 3)
    assert history.state()["load"] == [[6, 2, 0, 0], [3, 1], [2, 2, 2, 2]]
    resumed = RoutingHistory([4, 2, 4], window=2)
    resumed.restore(history.state())
    assert resumed.state() == history.state()
