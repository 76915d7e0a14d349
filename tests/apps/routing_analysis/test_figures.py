"""Every figure of a study has named axes with units."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from megamoe.apps.routing_analysis.figures import (
    DRAW,
    MOST_PANELS,
    RESULTS,
    figures_of,
    summary_lines,
    write_study,
)

LAYER: dict[str, Any] = {
    "collapse": 0.5,
    "required": {"0.9": {"mean": 2.5, "tokens_M": [0, 1, 1, 0]}},
    "load": {
        "inference": [0.5, 0.5],
        "training": [0.25, 0.75],
        "distance": 0.25,
        "inference_max_over_mean": 1.0,
        "training_max_over_mean": 1.5,
    },
    "tokens": {"mutual_information": 0.5, "expert_entropy": 1.0, "share": 0.5, "chance": 0.1, "experts": []},
    "map": {"explained": [0.5, 0.25], "xy_S2": [[0, 1], [1, 0]], "first_S": [-1, 1]},
}


def results_of(steps: list[int], layers: list[str]) -> dict[str, Any]:
    analyses: dict[str, Any] = {name: {number: found for number in layers} for name, found in LAYER.items()}
    analyses["positive"] = {"experts": {number: None for number in layers}, "dense": {}}
    row = {"run": "a$b_{", "lm_loss": 2.0, "tokens": 8, "analyses": analyses}
    rows = [copy.deepcopy(row | {"path": f"a$b_{{/step_{step}", "step": step}) for step in steps]
    change = {"earlier": "a", "later": "b", "earlier_step": 1, "later_step": 2}
    comparisons: dict[str, Any] = {
        "fluctuation": [{**change, "layers": {n: {"first": 0.5, "chosen": 0.5} for n in layers}}]
    }
    return {"thresholds": [0.9], "checkpoints": rows, "comparisons": comparisons}


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize("steps", [[2], [2, 1]])
def test_axes_have_names_and_units(name: str, steps: list[int]) -> None:
    figure = Figure()
    DRAW[name](figure, results_of(steps, ["1", "2", "3"]))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    bars = [axes for axes in shown if axes.get_label() == "<colorbar>"]
    for axes in shown:
        labels = (axes.get_ylabel(),) if axes in bars else (axes.get_xlabel(), axes.get_ylabel())
        for label in labels:
            assert label == "training step" or "(" in label, (name, label)
    assert len(shown) - len(bars) >= 1


def test_lines_over_steps_are_in_order() -> None:
    figure, results = Figure(), results_of([20, 10], ["1"])
    results["checkpoints"][0]["analyses"]["collapse"]["1"] = 0.25
    DRAW["collapse"](figure, results)
    (line,) = figure.axes[0].get_lines()
    assert np.array_equal(line.get_xdata(), [10, 20]) and np.array_equal(line.get_ydata(), [0.5, 0.25])


def test_runs_of_one_name_in_two_folders_are_two() -> None:
    figure, results = Figure(), results_of([10, 20], ["1", "2"])
    results["checkpoints"][1]["path"] = "other/a$b_{/step_20"
    DRAW["collapse"](figure, results)
    lines = figure.axes[0].get_lines()
    assert len(lines) == 2  # over the layers, not the steps
    assert all(np.array_equal(line.get_xdata(), [0, 1]) for line in lines)


def test_numbers_that_are_not_finite_are_written_as_names(tmp_path: Path) -> None:
    results = results_of([1], ["1"])
    results["checkpoints"][0]["lm_loss"] = float("inf")
    results["checkpoints"][0]["analyses"] = {"collapse": {"1": float("nan")}}
    write_study(tmp_path, results | {"comparisons": {}})
    row = json.loads((tmp_path / RESULTS).read_text())["checkpoints"][0]
    assert (row["lm_loss"], row["analyses"]["collapse"]["1"]) == ("Infinity", "NaN")


def test_many_layers_are_cut_and_said_so() -> None:
    figure = Figure()
    DRAW["load"](figure, results_of([1], [str(number) for number in range(1, 61)]))
    assert len([axes for axes in figure.axes if axes.get_visible()]) == MOST_PANELS
    assert figure.get_suptitle().endswith(f"(first {MOST_PANELS} of 60 layers)")


def test_only_what_was_analysed_is_drawn_and_said() -> None:
    results = results_of([1], ["1"])
    results["comparisons"] = {}
    results["checkpoints"][0]["analyses"] = {"collapse": {"1": None}}
    assert [*figures_of(results)] == ["collapse"]
    assert [*summary_lines(results)][1] == "  layer 1: representation collapse RC none"
