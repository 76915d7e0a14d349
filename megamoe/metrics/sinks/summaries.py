"""What W&B and TensorBoard get of a step: a number of keys that grows with neither experts nor layers.

metrics.jsonl keeps everything; here the layers and experts become summaries, see docs/metrics.md.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.metrics.sinks.heat_map import HeatMap

OF_LAYER = re.compile(r"moe/layer_(\d+)/(.+)")
FIVE = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "max": 1.0}
THREE = {name: FIVE[name] for name in ("min", "median", "max")}
MOST_FURTHER = 16  # names with a slash (losses, parts' own numbers) that are summarised
EXTREMES = 3  # most and least loaded experts
LOAD_EDGES = np.linspace(0.0, 4.0, 33)  # of load / mean; the last bin holds all above
MOST_WIDTHS = 33  # bins of the experts per token; the last holds all above


@dataclass
class Shown:
    """A step for W&B and TensorBoard.

    histograms: (counts, edges of the bins) by name. images: uint8 [height, width, 3] by name.
    """

    step: int
    time: float | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    images: dict[str, NDArray[np.uint8]] = field(default_factory=dict)


class Summaries:
    """Makes `Shown` of the metrics of each logged step, in their order."""

    def __init__(self, heat_map_every: int) -> None:
        self._heat_map = HeatMap(heat_map_every)

    def of(self, metrics: dict[str, Any]) -> Shown:
        """Return what is shown of a step; metrics: by their names in metrics.jsonl."""
        shown = Shown(metrics["step"], metrics.get("time"))
        layers: dict[str, dict[int, Any]] = defaultdict(dict)
        for key, value in metrics.items():
            found = OF_LAYER.fullmatch(key)
            if found is not None:
                layers[found[2]][int(found[1])] = value
            elif isinstance(value, int | float) and key != "step":
                shown.scalars[key] = value
        loads = layers.pop("load", {})
        layers.pop("rank_load", None)
        widths = layers.pop("width_histogram", {})
        further = sorted(name for name in layers if "/" in name)[:MOST_FURTHER]
        for name, of_layer in layers.items():
            if "/" not in name or name in further:
                quantiles = THREE if "/" in name else FIVE
                shown.scalars |= _quantiles(f"layers/{name}", list(of_layer.values()), quantiles)
        if widths:
            shown.histograms["experts_per_token"] = _widths(list(widths.values()))
        if loads:
            self._show_load(shown, loads)
        return shown

    def _show_load(self, shown: Shown, loads: dict[int, list[int]]) -> None:
        numbers = list(loads)
        relative_LE = relative_load(list(loads.values()))
        shown.scalars |= _quantiles("load", relative_LE.ravel().tolist(), FIVE)
        order = np.argsort(relative_LE, axis=None, kind="stable")
        for name, places in (("least", order), ("most", order[::-1])):
            for rank, place in enumerate(places[:EXTREMES].tolist(), start=1):
                layer, expert = divmod(place, relative_LE.shape[1])
                shown.scalars |= {
                    f"load/{name}_{rank}": float(relative_LE[layer, expert]),
                    f"load/{name}_{rank}_layer": numbers[layer],
                    f"load/{name}_{rank}_expert": expert,
                }
        counts, _ = np.histogram(np.minimum(relative_LE, LOAD_EDGES[-1]), LOAD_EDGES)
        shown.histograms["load/histogram"] = counts.tolist(), LOAD_EDGES.tolist()
        shown.images |= self._heat_map.add(shown.step, numbers, relative_LE)


def relative_load(loads: list[list[int]]) -> NDArray[np.float64]:
    """Return each expert's load / the mean of its layer, fp64 [layers, experts]; 0 without any load."""
    load_LE = np.array(loads, dtype=np.float64)
    mean_L1 = load_LE.mean(1, keepdims=True)
    return np.divide(load_LE, mean_L1, out=np.zeros_like(load_LE), where=mean_L1 > 0)


def _quantiles(prefix: str, values: list[float], quantiles: dict[str, float]) -> dict[str, float]:
    found = np.quantile(np.array(values, dtype=np.float64), list(quantiles.values())).tolist()
    return {f"{prefix}/{name}": value for name, value in zip(quantiles, found, strict=True)}


def _widths(histograms: list[list[int]]) -> tuple[list[int], list[float]]:
    """Return the sum over layers of tokens by their number of experts, and the edges of the bins."""
    counts = np.zeros(MOST_WIDTHS, dtype=np.int64)
    for histogram in histograms:
        np.add.at(counts, np.minimum(np.arange(len(histogram)), MOST_WIDTHS - 1), histogram)
    return counts.tolist(), [float(edge) for edge in range(MOST_WIDTHS + 1)]
