"""What W&B and TensorBoard get of a step: as many keys with any experts and layers."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.metrics import names

FIVE = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "max": 1.0}
THREE = {name: FIVE[name] for name in ("min", "median", "max")}
MOST_FURTHER = 16  # names with a slash (losses, parts' own numbers) that are summarised
LOAD_EDGES = np.linspace(0.0, 4.0, 33)  # of load / mean; the last bin holds all above
MOST_WIDTHS = 33  # bins of the experts per token; the last holds all above


@dataclass
class StepSummary:
    """A step for W&B and TensorBoard.

    histograms: (counts, edges of the bins) by name.
    """

    step: int
    time: float | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)


def summary_of(metrics: dict[str, Any]) -> StepSummary:
    """Return what is shown of a step; metrics: by their names in metrics.jsonl."""
    shown = StepSummary(metrics[names.STEP], metrics.get(names.TIME))
    layers: dict[str, dict[int, Any]] = defaultdict(dict)
    for key, value in metrics.items():
        found = names.IN_LAYER.fullmatch(key)
        if found is not None:
            layers[found[2]][int(found[1].removeprefix("layer_"))] = value
        elif isinstance(value, int | float) and key != names.STEP:
            shown.scalars[key] = value
    loads = layers.pop(names.LOAD, {})
    layers.pop(names.RANK_LOAD, None)
    widths = layers.pop(names.WIDTH_HISTOGRAM, {})
    further = sorted(name for name in layers if "/" in name)[:MOST_FURTHER]
    for name, of_layer in layers.items():
        if "/" not in name or name in further:
            quantiles = THREE if "/" in name else FIVE
            for quantile, value in _quantiles(list(of_layer.values()), quantiles).items():
                shown.scalars[names.fill(names.OVER_LAYERS, name, quantile)] = value
    if widths:
        shown.histograms[names.WIDTHS] = _widths(list(widths.values()))
    if loads:
        _show_load(shown, list(loads.values()))
    return shown


def _show_load(shown: StepSummary, loads: list[list[int]]) -> None:
    relative_N = np.concatenate(_relative_load(loads))  # of the experts of all layers
    for quantile, value in _quantiles(relative_N.tolist(), FIVE).items():
        shown.scalars[names.fill(names.LOAD_QUANTILE, quantile)] = value
    counts, _ = np.histogram(np.minimum(relative_N, LOAD_EDGES[-1]), LOAD_EDGES)
    shown.histograms[names.LOAD_HISTOGRAM] = counts.tolist(), LOAD_EDGES.tolist()


def _relative_load(loads: list[list[int]]) -> list[NDArray[np.float64]]:
    """Return, of each layer, the experts' load / its mean, fp64 [experts]; 0 without any load."""
    found = []
    for load_E in (np.array(load, dtype=np.float64) for load in loads):
        mean = load_E.mean()
        found.append(load_E / mean if mean > 0 else np.zeros_like(load_E))
    return found


def _quantiles(values: list[float], quantiles: dict[str, float]) -> dict[str, float]:
    found = np.quantile(np.array(values, dtype=np.float64), list(quantiles.values())).tolist()
    return dict(zip(quantiles, found, strict=True))


def _widths(histograms: list[list[int]]) -> tuple[list[int], list[float]]:
    """Return the sum over layers of tokens by their number of experts, and the edges of the bins."""
    counts = np.zeros(MOST_WIDTHS, dtype=np.int64)
    for histogram in histograms:
        np.add.at(counts, np.minimum(np.arange(len(histogram)), MOST_WIDTHS - 1), histogram)
    return counts.tolist(), [float(edge) for edge in range(MOST_WIDTHS + 1)]
