"""The charts of a report, drawn with matplotlib for a light and a dark page.

A chart is a function `draw(figure, rows, theme)` on a figure or a part of one, so that the same
charts stand alone in the page and together in `report.png`. `charts_for` names those that a record
has data for. Lists indexed by record end in _R, by expert in _E, by bin in _B.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import EngFormatter, MaxNLocator

from megamoe.metrics.formats import readable
from megamoe.metrics.report.run_statistics import Rows, further_sets, moe_layers, series
from megamoe.metrics.report.themes import Theme, chart_style

WIDTH_IN = 10.4
DPI = 150
MAX_BINS = 100  # columns of a heat map
HEAT_MAPS_PER_ROW = 2
CURVES_PER_ROW = 3
NAMED_LAYERS = 8  # more of them share a few names in the legend
MOST_MAPS, MOST_CURVES = 200, 30  # of a chart: a picture of more would be too large to be drawn
LARGEST = 1e30  # that is drawn: beside 1e308 the limits of an axis overflow


@dataclass(frozen=True)
class Chart:
    """One chart of the page; `height_in` at the page's width."""

    title: str
    note: str
    draw: Callable[[FigureBase, Rows, Theme], None]
    height_in: float


def charts_for(rows: Rows) -> list[Chart]:
    """Return the charts that the records have data for, in the order of the page."""
    charts = []
    if series(rows, "train/lm_loss")[0] or series(rows, "val/lm_loss")[0]:
        note = "Language-model loss in nats per token, without auxiliary losses."
        charts.append(Chart("Loss", note, draw_loss, 3.9))
    if names := auxiliary_losses(rows):
        names = names[:MOST_CURVES]
        height_in = 2.4 * -(-len(names) // CURVES_PER_ROW)
        charts.append(
            Chart("Auxiliary losses", "Unweighted, each on its own scale.", draw_auxiliary, height_in)
        )
    if any(series(rows, key)[0] for key, _, _ in _OPTIMISATION):
        note = "Gradient norm, learning rate, and tokens per second of the whole run."
        charts.append(Chart("Optimisation and speed", note, draw_optimisation, 2.5))
    if layers := moe_layers(rows):
        note = "Load of the busiest expert over the mean load; 1 is even."
        charts.append(Chart("Imbalance", note, draw_imbalance, 2.9))
        note = "Each expert's share of the pairs, relative to an even share: 0 is idle, 1 is fair."
        if len(layers) > MOST_MAPS:
            note += f" The first {MOST_MAPS} of {len(layers)} layers."
        height_in = 0.5 + 1.9 * -(-min(len(layers), MOST_MAPS) // HEAT_MAPS_PER_ROW)
        charts.append(Chart("Expert load", note, draw_load, height_in))
    return charts


def render(chart: Chart, rows: Rows, theme: Theme) -> bytes:
    """Return one chart as a PNG."""
    with matplotlib.rc_context(chart_style(theme)):
        figure = _new_figure(chart.height_in)
        chart.draw(figure, rows, theme)
        return _as_png(figure)


def render_all(charts: list[Chart], rows: Rows, theme: Theme, title: str) -> bytes:
    """Return a PNG with the title on top and all charts below each other, each with its own title."""
    heights = [chart.height_in + 0.4 for chart in charts]
    with matplotlib.rc_context(chart_style(theme)):
        figure = _new_figure(0.5 + sum(heights))
        parts = figure.subfigures(1 + len(charts), 1, height_ratios=[0.5, *heights], squeeze=False)[:, 0]
        parts[0].text(0.012, 0.35, readable(title), fontsize=17, fontweight="bold", va="center")
        for chart, part in zip(charts, parts[1:], strict=True):
            part.suptitle(chart.title, x=0.012, ha="left", fontsize=12, fontweight="bold")
            chart.draw(part, rows, theme)
        return _as_png(figure)


def _new_figure(height_in: float) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _as_png(figure: Figure) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def drawn(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Return the series as numbers, clipped to the range that can be drawn."""
    steps, values = series(rows, key)
    return steps, np.clip(np.asarray(values, dtype=float), -LARGEST, LARGEST).tolist()


def draw_loss(figure: FigureBase, rows: Rows, theme: Theme) -> None:
    """Draw the training loss, raw and smoothed, and each validation set's losses."""
    axes = figure.subplots()
    steps, losses_R = drawn(rows, "train/lm_loss")
    _raw_and_smoothed(axes, steps, losses_R, theme.blue, label="training (smoothed)")
    shown = list(losses_R)
    sets = [("validation", "val/lm_loss")] + [
        (f"validation: {readable(name, 30)}", f"val/{name}/lm_loss") for name in further_sets(rows)
    ]
    colours = (theme.orange, *theme.further)
    for index, (label, key) in enumerate(sets):
        steps, values = drawn(rows, key)
        if steps:
            colour = colours[index % len(colours)]
            axes.plot(steps, values, color=colour, marker="o", markersize=4, linewidth=1.2, label=label)
            shown += values
    _limit_spikes(axes, shown)
    _label_steps(axes)
    axes.set_ylabel("loss")
    axes.legend(loc="upper right")


def auxiliary_losses(rows: Rows) -> list[str]:
    """Return the names of the auxiliary losses in the records: the other keys of `train/`."""
    own = {"lm_loss", "loss", "grad_norm", "lr", "batch_size"}
    names = {key.removeprefix("train/") for row in rows for key in row if key.startswith("train/")}
    return sorted(names - own)


def draw_auxiliary(figure: FigureBase, rows: Rows, theme: Theme) -> None:
    """Draw one small chart per auxiliary loss, since their scales are unrelated."""
    names = auxiliary_losses(rows)[:MOST_CURVES]
    for axes, name in zip(_small_axes(figure, len(names)), names, strict=True):
        steps, values_R = drawn(rows, f"train/{name}")
        _raw_and_smoothed(axes, steps, values_R, theme.blue)
        _limit_spikes(axes, values_R)
        axes.set_title(readable(name, 30))


_OPTIMISATION: tuple[tuple[str, str, Any], ...] = (  # key, title, format of the ticks
    ("train/grad_norm", "gradient norm", None),
    ("train/lr", "learning rate", lambda lr, _: f"{lr:.1e}".replace("e-0", "e-") if lr else "0"),
    ("perf/tokens_per_s", "tokens per second", EngFormatter(sep="")),
)


def draw_optimisation(figure: FigureBase, rows: Rows, theme: Theme) -> None:
    """Draw gradient norm, learning rate and speed side by side."""
    for axes, (key, title, tick_format) in zip(
        _small_axes(figure, len(_OPTIMISATION)), _OPTIMISATION, strict=True
    ):
        steps, values_R = drawn(rows, key)
        if key == "train/lr":
            axes.plot(steps, values_R, color=theme.blue)
        else:
            _raw_and_smoothed(axes, steps, values_R, theme.blue)
            _limit_spikes(axes, [0.0, *values_R])
        axes.set_ylim(bottom=0)
        if tick_format is not None:
            axes.yaxis.set_major_formatter(tick_format)
        axes.set_title(title)


def draw_imbalance(figure: FigureBase, rows: Rows, theme: Theme) -> None:
    """Draw a smoothed line for each MoE layer, coloured by depth."""
    axes = figure.subplots()
    layers = moe_layers(rows)
    shades = LinearSegmentedColormap.from_list("depth", theme.depth)
    named_every = -(-len(layers) // NAMED_LAYERS)
    for index, layer in enumerate(layers):
        steps, values_R = drawn(rows, f"moe/{layer}/imbalance")
        colour = shades(index / max(1, len(layers) - 1))
        named = index % named_every == 0 or index == len(layers) - 1
        axes.plot(
            steps,
            smooth(values_R),
            color=colour,
            label=readable(layer.replace("_", " "), 30) if named else None,
        )
    axes.axhline(1.0, color=theme.muted, linewidth=0.9, linestyle=(0, (4, 3)))
    _label_steps(axes)
    axes.set_ylabel("max / mean load")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02))


def draw_load(figure: FigureBase, rows: Rows, theme: Theme) -> None:
    """Draw a heat map per MoE layer: steps on the x axis, experts on the y axis, share of the load as
    colour.
    """
    layers = moe_layers(rows)[:MOST_MAPS]
    maps = [(layer, *load_shares(rows, layer)) for layer in layers]
    finite = [shares_EB[np.isfinite(shares_EB)] for _, _, shares_EB in maps]
    highest = np.quantile(np.concatenate(finite), 0.995) if any(part.size for part in finite) else 2.0
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=max(2.0, float(np.ceil(highest * 2) / 2)))
    colours = LinearSegmentedColormap.from_list("load", theme.load).with_extremes(bad=theme.grid)
    columns = min(HEAT_MAPS_PER_ROW, len(layers))
    grid = figure.subplots(-(-len(layers) // columns), columns, squeeze=False, sharex=True)
    for axes, (layer, edges_B, shares_EB) in zip(grid.flat, maps, strict=False):
        image = axes.pcolormesh(
            edges_B, np.arange(len(shares_EB) + 1) - 0.5, shares_EB, cmap=colours, norm=norm, rasterized=True
        )
        axes.set_title(readable(layer.replace("_", " "), 30))
        axes.set_ylabel("expert")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        axes.grid(False)
    for axes in grid.flat[len(layers) :]:
        axes.set_visible(False)
    for axes in grid.flat[len(layers) - columns : len(layers)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
        _label_steps(axes)
    lines = len(grid)
    bar = figure.colorbar(
        image, ax=grid, fraction=0.03, aspect=15 * lines, pad=0.012, extend="max", extendfrac=0.06 / lines
    )
    bar.set_label("share / even share")
    bar.outline.set_visible(False)


def load_shares(rows: Rows, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """Return how the load of a layer is distributed, in bins of neighbouring records.

    Returns:
        edges_B (float, bins + 1): steps where the bins begin and end.
        shares_EB (float, experts x bins): share of the bin's pairs x number of experts; NaN where
            a bin has no pair at all.
    """
    steps, loads = series(rows, f"moe/{layer}/load")
    bins = np.array_split(np.arange(len(steps)), min(MAX_BINS, len(steps)))
    loads_RE = np.minimum(np.asarray(loads, dtype=float), LARGEST)
    loads_EB = np.stack([loads_RE[members].sum(axis=0) for members in bins], axis=1)
    totals_B = loads_EB.sum(axis=0)
    shares_EB = len(loads_EB) * loads_EB / np.where(totals_B == 0, np.nan, totals_B)
    lasts = [steps[members[-1]] for members in bins]
    return np.asarray([steps[0] - _usual_gap(steps), *lasts], dtype=float), shares_EB


def smooth(values: list[float]) -> np.ndarray:
    """Return the centred moving average over about a thirtieth of the values. Non-finite values are skipped.

    The window shrinks towards both ends, to a third: the curve neither lags behind a fall nor bends
    much at the edges.
    """
    values_R = np.asarray(values, dtype=float)
    finite_R = np.isfinite(values_R)
    at = np.arange(len(values_R))
    half = max(2, len(values_R) // 60)
    half_R = np.clip(np.minimum(at, at[::-1]), half // 3, half)
    # Beside a larger value the running sum would lose all the others.
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite_R, np.clip(values_R, -1e9, 1e9), 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite_R)])
    begin_R, end_R = np.maximum(at - half_R, 0), np.minimum(at + half_R + 1, len(values_R))
    num_finite_R = counts[end_R] - counts[begin_R]
    return (sums[end_R] - sums[begin_R]) / np.where(num_finite_R == 0, np.nan, num_finite_R)


def _usual_gap(steps: list[int]) -> float:
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def _raw_and_smoothed(
    axes: Axes, steps: list[int], values: list[float], colour: str, label: str | None = None
) -> None:
    axes.plot(steps, values, color=colour, alpha=0.4, linewidth=0.9)
    axes.plot(steps, smooth(values), color=colour, linewidth=1.8, label=label)


def _limit_spikes(axes: Axes, values: list[float]) -> None:
    """Limit the y axis so that a few extreme values do not flatten the others."""
    finite = np.asarray([value for value in values if np.isfinite(value)], dtype=float)
    if finite.size < 2:
        return
    low, high = np.quantile(finite, [0.0, 0.99])
    high = max(high, min(float(finite[:3].max()), 3 * high))  # a loss starts high, and that is no spike
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _label_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def _small_axes(figure: FigureBase, count: int) -> list[Axes]:
    """Return `count` axes in rows of two or three; a single one takes half a row."""
    columns = max(2, min(count, CURVES_PER_ROW))
    grid = figure.subplots(-(-count // columns), columns, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for axes in grid.flat[:count]:
        _label_steps(axes)
    return list(grid.flat[:count])
