"""A picture of the load over the steps: a row for each expert, a column for each logged step."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

GROUPS = 4  # pictures; each shows neighbouring layers
COLUMNS = 200  # logged steps
ROWS = 256
LIMIT = 3.0  # of the colours: 8 times above and below the mean


class HeatMap:
    """Keeps the last COLUMNS logged steps and draws them every `every` steps; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps: deque[tuple[int, NDArray[np.float32]]] = deque(maxlen=COLUMNS)

    def add(
        self, step: int, layers: list[int], relative_LE: NDArray[np.float64]
    ) -> dict[str, NDArray[np.uint8]]:
        """Take in a step; return the pictures by name if they are due, otherwise nothing.

        layers: the blocks' numbers. relative_LE: load / mean of the layer.
        """
        if not self._every:
            return {}
        self._steps.append((step, relative_LE.astype(np.float32)))
        if step % self._every:
            return {}
        pictures = {}
        for number, places in enumerate(np.array_split(np.arange(len(layers)), GROUPS), start=1):
            if len(places):
                rows_RS = log_rows(np.stack([load[places].ravel() for _, load in self._steps], axis=1))
                names = f"{layers[places[0]]} to {layers[places[-1]]}"
                pictures[f"load/heat_map_{number}"] = self._draw(rows_RS, names)
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
