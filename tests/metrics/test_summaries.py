"""What W&B and TensorBoard get: a bounded number of keys, summaries by hand."""

from typing import Any

import pytest

from megamoe.metrics import names
from megamoe.metrics.sinks.summaries import StepSummary, summary_of
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
    return [*shown.scalars, *shown.histograms]


def test_sixty_layers_have_fewer_than_200_keys_and_experts_add_none() -> None:
    many, few = (summary_of(step_of(60, experts)) for experts in (256, 8))
    assert sorted(keys(many)) == sorted(keys(few))
    assert len(set(keys(many))) == len(keys(many)) < 200
    assert len(keys(summary_of(step_of(8, 8)))) == len(keys(few)), "nor do layers"


def test_further_names_are_cut_at_a_cap() -> None:
    metrics = {f"moe/layer_01/loss/name_{n:03d}": 1.0 for n in range(500)}
    assert len(keys(summary_of({"step": 1, **metrics}))) == 3 * 16


def test_summaries_by_hand() -> None:
    loads = {"moe/layer_02/load": [4, 0, 0], "moe/layer_04/load": [1, 2, 3]}
    dead = {"moe/layer_02/dead": 2, "moe/layer_04/dead": 0, "moe/dead": 2}
    widths = {"moe/layer_02/width_histogram": [2, 1], "moe/layer_04/width_histogram": [0, 3, *[0] * 40, 7]}
    shown = summary_of({"step": 3, "time": 5.0, "train/lr": 0.1, **loads, **dead, **widths})
    assert (shown.step, shown.time) == (3, 5.0)
    expected = {"time": 5.0, "train/lr": 0.1, "moe/dead": 2}
    # Loads over their means: 3, 0, 0 and 0.5, 1, 1.5.
    quantiles = {"layers/dead": (0, 0.5, 1, 1.5, 2), "load": (0, 0.125, 0.75, 1.375, 3)}
    for name, values in quantiles.items():
        expected |= zip((f"{name}/{n}" for n in ("min", "p25", "median", "p75", "max")), values, strict=True)
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
