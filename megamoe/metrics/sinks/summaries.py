"""What W&B and TensorBoard get of a step: as many keys with any experts and layers, and a load picture."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.metrics import names

PICTURES = 4  # each shows neighbouring layers
COLUMNS = 200  # logged steps
ROWS = 256
LIMIT = 3.0  # of the colours: 8 times above and below the mean


class HeatMap:
    """Keeps the last COLUMNS logged steps and draws them every `every` steps; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._passed: int | None = None  # multiples of `every`; not each of them is a logged step
        self._steps: deque[tuple[int, list[NDArray[np.float32]]]] = deque(maxlen=COLUMNS)

    def add(
        self, step: int, layers: list[int], relative: list[NDArray[np.float64]]
    ) -> dict[str, NDArray[np.uint8]]:
        """Take in a step; return the pictures by name if they are due, otherwise nothing.

        layers: the blocks' numbers. relative: of each layer, the experts' load / its mean.
        """
        if not self._every:
            return {}
        self._steps.append((step, [load_E.astype(np.float32) for load_E in relative]))
        before = (step - 1) // self._every if self._passed is None else self._passed
        self._passed = step // self._every
        if self._passed == before:
            return {}
        pictures = {}
        for number, places in enumerate(np.array_split(np.arange(len(layers)), PICTURES), start=1):
            if len(places):
                rows_RS = log_rows(np.stack([_joined(load, places) for _, load in self._steps], axis=1))
                shown = f"{layers[places[0]]} to {layers[places[-1]]}"
                pictures[names.fill(names.HEAT_MAP, number)] = self._draw(rows_RS, shown)
        return pictures

    def _draw(self, rows_RS: NDArray[np.float32], layers: str) -> NDArray[np.uint8]:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        picture = axes.imshow(
            rows_RS, aspect="auto", cmap="RdBu_r", vmin=-LIMIT, vmax=LIMIT, interpolation="nearest"
        )
        steps = [step for step, _ in self._steps]
        ticks = sorted({0, len(steps) // 2, len(steps) - 1})
        axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
        axes.set_yticks([])
        axes.set_xlabel("step")
        axes.set_ylabel(f"experts of blocks {layers}, from top to bottom")
        figure.colorbar(picture, label="log2(load / mean load of the layer)")
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _joined(relative: list[NDArray[np.float32]], places: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the experts of these layers, one layer after the other."""
    return np.concatenate([relative[place] for place in places])


def log_rows(relative_RS: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log2 of the relative load, within the limits; of more than ROWS rows, the ones furthest from 0.

    Neighbouring experts then share a row, [ROWS at most, steps].
    """
    values = np.log2(np.clip(relative_RS, 2.0**-LIMIT, 2.0**LIMIT)).astype(np.float32)
    shared = -(-len(values) // ROWS)
    if shared == 1:
        return values
    padded = np.pad(values, ((0, -len(values) % shared), (0, 0)))
    blocks = padded.reshape(-1, shared, values.shape[1])
    furthest = np.abs(blocks).argmax(axis=1, keepdims=True)
    rows: NDArray[np.float32] = np.take_along_axis(blocks, furthest, axis=1)[:, 0]
    return rows


FIVE = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "max": 1.0}
THREE = {name: FIVE[name] for name in ("min", "median", "max")}
MOST_FURTHER = 16  # names with a slash (losses, parts' own numbers) that are summarised
EXTREMES = 3  # most and least loaded experts
LOAD_EDGES = np.linspace(0.0, 4.0, 33)  # of load / mean; the last bin holds all above
MOST_WIDTHS = 33  # bins of the experts per token; the last holds all above


@dataclass
class StepSummary:
    """A step for W&B and TensorBoard.

    histograms: (counts, edges of the bins) by name. images: uint8 [height, width, 3] by name.
    """

    step: int
    time: float | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    images: dict[str, NDArray[np.uint8]] = field(default_factory=dict)


class Summaries:
    """Makes `StepSummary` of the metrics of each logged step, in their order."""

    def __init__(self, heat_map_every: int) -> None:
        self._heat_map = HeatMap(heat_map_every)

    def of(self, metrics: dict[str, Any]) -> StepSummary:
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
            self._show_load(shown, loads)
        return shown

    def _show_load(self, shown: StepSummary, loads: dict[int, list[int]]) -> None:
        numbers, fill = list(loads), names.fill
        relative = relative_load(list(loads.values()))
        relative_N = np.concatenate(relative)  # of the experts of all layers
        first_L = np.cumsum([0, *map(len, relative)])
        for quantile, value in _quantiles(relative_N.tolist(), FIVE).items():
            shown.scalars[fill(names.LOAD_QUANTILE, quantile)] = value
        order = np.argsort(relative_N, kind="stable")
        for name, places in (("least", order), ("most", order[::-1])):
            for rank, place in enumerate(places[:EXTREMES].tolist(), start=1):
                layer = int(np.searchsorted(first_L, place, side="right")) - 1
                shown.scalars |= {
                    fill(names.EXTREME, name, rank): float(relative_N[place]),
                    fill(names.EXTREME_LAYER, name, rank): numbers[layer],
                    fill(names.EXTREME_EXPERT, name, rank): place - int(first_L[layer]),
                }
        counts, _ = np.histogram(np.minimum(relative_N, LOAD_EDGES[-1]), LOAD_EDGES)
        shown.histograms[names.LOAD_HISTOGRAM] = counts.tolist(), LOAD_EDGES.tolist()
        shown.images |= self._heat_map.add(shown.step, numbers, relative)


def relative_load(loads: list[list[int]]) -> list[NDArray[np.float64]]:
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
