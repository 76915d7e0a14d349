"""The sections of a report as one PNG, drawn with matplotlib.

Every axes has its place in inches, so that matplotlib measures no texts for a layout.
"""

import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from megamoe.apps.report.panels import Panel, Section
from megamoe.apps.report.themes import Theme, chart_style, colour_of
from megamoe.metrics.formats import readable

WIDTH_IN, DPI = 10.4, 110
MARGIN_IN, TITLE_IN, SECTION_IN = 0.15, 0.55, 0.42
LEFT_IN, BOTTOM_IN, TOP_IN, BAR_IN = 0.72, 0.48, 0.30, 0.72  # inside a panel, around its axes
COLUMNS, PANEL_IN, ALONE_IN = 3, 2.15, 3.4
MOST_SHOWN = 24  # panels of a section; the page has all


def render(sections: list[Section], theme: Theme, title: str) -> bytes:
    """Return a PNG with the title on top and the sections below each other."""
    heights = [_height_in(section) for section in sections]
    total_in = TITLE_IN + sum(heights) + MARGIN_IN
    with matplotlib.rc_context(chart_style(theme)):
        figure = Figure(figsize=(WIDTH_IN, total_in), dpi=DPI)
        FigureCanvasAgg(figure)
        x = MARGIN_IN / WIDTH_IN
        figure.text(x, 1 - 0.3 / total_in, readable(title), fontsize=17, fontweight="bold", va="center")
        top_in = total_in - TITLE_IN
        for section, height_in in zip(sections, heights, strict=True):
            shown = section.title
            if len(section.panels) > MOST_SHOWN:
                shown += f" (the first {MOST_SHOWN} of {len(section.panels)})"
            figure.text(x, (top_in - 0.22) / total_in, shown, fontsize=12, fontweight="bold", va="center")
            _draw_section(figure, section, theme, top_in - SECTION_IN, total_in)
            top_in -= height_in
        png = io.BytesIO()
        figure.savefig(png, format="png")
        return png.getvalue()


def _height_in(section: Section) -> float:
    panels = min(len(section.panels), MOST_SHOWN)
    return SECTION_IN + (ALONE_IN * panels if section.wide else PANEL_IN * -(-panels // COLUMNS))


def _draw_section(figure: Figure, section: Section, theme: Theme, top_in: float, total_in: float) -> None:
    panels = section.panels[:MOST_SHOWN]
    columns, height_in = (1, ALONE_IN) if section.wide else (COLUMNS, PANEL_IN)
    width_in = (WIDTH_IN - 2 * MARGIN_IN) / columns
    named_before: list[str] = []
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        bar_in = BAR_IN if panel.heat_map is not None else 0.12
        left_in = MARGIN_IN + column * width_in + LEFT_IN
        bottom_in = top_in - (row + 1) * height_in + BOTTOM_IN
        inner_in = (width_in - LEFT_IN - bar_in, height_in - BOTTOM_IN - TOP_IN)
        box = (left_in / WIDTH_IN, bottom_in / total_in, inner_in[0] / WIDTH_IN, inner_in[1] / total_in)
        axes = figure.add_axes(box)
        if panel.heat_map is None:
            _draw_curves(axes, panel, theme)
            names = [curve.name for curve in panel.curves]
            if names != named_before:
                _draw_legend(axes, panel)
            named_before = names
        else:
            bar = figure.add_axes((box[0] + box[2] + 0.006, box[1], 0.008, box[3]))
            _draw_map(axes, bar, panel, theme)
        if not section.wide:
            axes.set_title(panel.title)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def _draw_curves(axes: Axes, panel: Panel, theme: Theme) -> None:
    for curve in panel.curves:
        colour = colour_of(theme, curve.colour)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            curve.x,
            curve.y,
            color=colour,
            alpha=0.4 if curve.faint else 1.0,
            linewidth=0.9 if curve.faint else 1.5,
            linestyle="--" if curve.dashed else "-",
            marker="o" if curve.points else None,
            markersize=3.5,
            label=readable(curve.name, 30) if curve.named and not curve.faint else None,
        )
    if panel.level is not None:
        axes.axhline(panel.level, color=theme.muted, linewidth=0.9, linestyle=(0, (4, 3)))
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    high = axes.get_ylim()[1]
    if high >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif high < 1e-2:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1e}".replace("e-0", "e-") if value else "0")


def _draw_legend(axes: Axes, panel: Panel) -> None:
    named = sum(curve.named and not curve.faint for curve in panel.curves)
    if named > 1:
        axes.legend(
            loc="upper right", fontsize=6.5, ncols=-(-named // 5), borderaxespad=0.2, frameon=True,
            framealpha=0.75, edgecolor="none",
        )  # fmt: skip


def _draw_map(axes: Axes, bar: Axes, panel: Panel, theme: Theme) -> None:
    heat_map = panel.heat_map
    assert heat_map is not None
    top = heat_map.highest
    norm = TwoSlopeNorm(1.0, 0.0, top) if heat_map.scale == "load" else Normalize(0.0, top)
    stops = theme.load if heat_map.scale == "load" else (theme.background, theme.blue)
    colours = LinearSegmentedColormap.from_list(heat_map.scale, stops).with_extremes(bad=theme.grid)
    edges_B, rows = np.asarray(heat_map.edges_B), len(heat_map.values_EB)
    gaps = np.diff(edges_B)
    if np.ptp(gaps) <= 0.05 * gaps.mean():  # equal columns are drawn several times as fast
        extent = (edges_B[0], edges_B[-1], -0.5, rows - 0.5)
        image: Any = axes.imshow(
            heat_map.values_EB, cmap=colours, norm=norm, extent=extent, aspect="auto", origin="lower",
            interpolation="nearest",
        )  # fmt: skip
    else:
        image = axes.pcolormesh(
            edges_B, np.arange(rows + 1) - 0.5, heat_map.values_EB, cmap=colours, norm=norm
        )
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(False)
    legend = axes.figure.colorbar(image, cax=bar, extend="max" if heat_map.scale == "load" else "neither")
    legend.set_label(heat_map.value, fontsize=7.5)
    legend.ax.tick_params(labelsize=7)
    legend.outline.set_visible(False)
