"""What W&B and TensorBoard get: a bounded number of keys, summaries by hand, pictures, alerts."""

import math
from typing import Any

import numpy as np
import pytest

from megamoe.metrics import names
from megamoe.metrics.sinks.summaries import ROWS, HeatMap, StepSummary, Summaries, log_rows
from megamoe.metrics.sinks.wandb_sink import STALL, WINDOW, Alerts
from megamoe.train.routing_metrics import RoutingHistory, routing_metrics
from tests.train.test_routing_metrics import layer_of

LOSSES = dict.fromkeys(("switch_balance", "z_loss", "importance", "load"), 0.5)


def step_of(layers: int, experts: int, step: int = 100) -> dict[str, Any]:
    """A step with every metric that there is."""
    record = {
        number: layer_of(
            [number + expert % 5 for expert in range(experts)],
            width=[0, 5, 3, *[0] * (experts - 2)],
            losses=LOSSES,
            gradient_shares=LOSSES,
            part_metrics={
                "scorer/temperature": 0.3,
                "scorer/embedding_norm": 1.0,
                "score_function/bias_range": 0.1,
            },
        )
        for number in range(1, layers + 1)
    }
    history = RoutingHistory([experts] * layers, window=1)
    history.update(record)
    metrics = routing_metrics(record, 1, history, expert_ranks=2)
    plain = {it.key: 1.0 for it in (*names.TRAINING, *names.SPEED) if "<" not in it.key}
    losses = {key.format(name): 1.0 for key in ("train/{}", "train/{}/weighted") for name in LOSSES}
    return plain | losses | metrics | {"step": step, "time": 0.0, "val/code/lm_loss": 1.0}


def keys(shown: StepSummary) -> list[str]:
    return [*shown.scalars, *shown.histograms, *shown.images]


def test_sixty_layers_have_fewer_than_200_keys_and_experts_add_none() -> None:
    many, few = (Summaries(100).of(step_of(60, experts)) for experts in (256, 8))
    assert sorted(keys(many)) == sorted(keys(few))
    assert len(set(keys(many))) == len(keys(many)) < 200
    assert len(keys(Summaries(100).of(step_of(8, 8)))) == len(keys(few)), "nor do layers"


def test_further_names_are_cut_at_a_cap() -> None:
    metrics = {f"moe/layer_01/loss/name_{n:03d}": 1.0 for n in range(500)}
    assert len(keys(Summaries(0).of({"step": 1, **metrics}))) == 3 * 16


def test_summaries_by_hand() -> None:
    loads = {"moe/layer_02/load": [4, 0, 0], "moe/layer_04/load": [1, 2, 3]}
    dead = {"moe/layer_02/dead": 2, "moe/layer_04/dead": 0, "moe/dead": 2}
    widths = {"moe/layer_02/width_histogram": [2, 1], "moe/layer_04/width_histogram": [0, 3, *[0] * 40, 7]}
    shown = Summaries(0).of({"step": 3, "time": 5.0, "train/lr": 0.1, **loads, **dead, **widths})
    assert (shown.step, shown.time, shown.images) == (3, 5.0, {})
    expected = {"time": 5.0, "train/lr": 0.1, "moe/dead": 2}
    # Loads over their means: 3, 0, 0 and 0.5, 1, 1.5.
    quantiles = {"layers/dead": (0, 0.5, 1, 1.5, 2), "load": (0, 0.125, 0.75, 1.375, 3)}
    for name, values in quantiles.items():
        expected |= zip((f"{name}/{n}" for n in ("min", "p25", "median", "p75", "max")), values, strict=True)
    extremes = {"most": [(3, 2, 0), (1.5, 4, 2), (1, 4, 1)], "least": [(0, 2, 1), (0, 2, 2), (0.5, 4, 0)]}
    for name, found in extremes.items():
        for rank, (value, layer, expert) in enumerate(found, start=1):
            expected[f"load/{name}_{rank}"] = value
            expected[f"load/{name}_{rank}_layer"], expected[f"load/{name}_{rank}_expert"] = layer, expert
    assert shown.scalars == pytest.approx(expected)
    counts, edges = shown.histograms["load/histogram"]
    assert {edges[at]: count for at, count in enumerate(counts) if count} == {
        0: 2,
        0.5: 1,
        1: 1,
        1.5: 1,
        3: 1,
    }
    counts, edges = shown.histograms["experts_per_token"]
    assert {at: count for at, count in enumerate(counts) if count} == {0: 2, 1: 4, 32: 7}
    assert edges == list(range(34))


def test_a_heat_map_comes_with_the_next_logged_step() -> None:
    """Of the logged steps 3, 6, 9, ..., few are multiples of 4."""
    heat_map, load_LE = HeatMap(every=4), [np.ones(4)]
    assert [step for step in range(3, 22, 3) if heat_map.add(step, [1], load_LE)] == [6, 9, 12, 18, 21]
    assert not heat_map.add(22, [1], load_LE) and heat_map.add(24, [1], load_LE)
    resumed = HeatMap(every=4)
    assert not resumed.add(6, [1], load_LE) and resumed.add(9, [1], load_LE)


def test_heat_maps_come_at_intervals_in_at_most_four_groups() -> None:
    heat_map, layers = HeatMap(every=2), list(range(1, 11))
    relative_LE = np.ones((10, 4))
    assert heat_map.add(1, layers, list(relative_LE)) == {}
    pictures = heat_map.add(2, layers, list(relative_LE))
    assert sorted(pictures) == [f"load/heat_map_{n}" for n in (1, 2, 3, 4)]
    even = pictures["load/heat_map_1"]
    assert (even.shape, even.dtype) == ((500, 800, 3), np.uint8)
    relative_LE[:, 0] = 0.0
    dead = HeatMap(every=3).add(3, layers, list(relative_LE))["load/heat_map_1"]
    blue, blue_before = (int(((it[..., 2] > 80) & (it[..., 0] < 30)).sum()) for it in (dead, even))
    assert blue > blue_before + 10_000, "a dead expert is dark blue"


def test_many_rows_share_a_row_with_the_one_furthest_from_even() -> None:
    relative_RS = np.ones((2 * ROWS + 1, 2), dtype=np.float32)
    relative_RS[4, 0], relative_RS[3, 1] = 4.0, 0.0
    rows_RS = log_rows(relative_RS)
    assert rows_RS.shape == (171, 2) and rows_RS[1].tolist() == [2.0, -3.0]  # three experts a row
    assert np.count_nonzero(rows_RS) == 2


def alerts(rows: list[dict[str, float]]) -> list[str]:
    judge = Alerts()
    return [f"{n}: {it.title}" for n, row in enumerate(rows) for it in judge.of({"step": n, **row})]


def test_alerts() -> None:
    losses = [3.0, 2.0, 3.1, 3.2, 2.0, math.nan, math.inf, 2.0]
    assert alerts([{"train/lm_loss": loss} for loss in losses]) == ["2: divergence", "5: divergence"]
    dead: list[dict[str, float]] = [{"moe/dead": count} for count in (0, 1, 1, 2, 0, 1)]
    assert alerts(dead) == ["1: dead experts", "3: dead experts", "5: dead experts"]
    usual: list[dict[str, float]] = [{"perf/step_s": 1.0}] * WINDOW
    assert alerts([*usual, {"perf/step_s": STALL + 0.1}, {"perf/step_s": 1.0}]) == [f"{WINDOW}: stall"]
    assert alerts([{"perf/step_s": 1.0}, {"perf/step_s": 100.0}]) == [], "the first steps compile and load"
