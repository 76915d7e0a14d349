"""The figure of the coordinate check, as PNG."""

import io
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megamoe.apps.width.coordinates import exponents

STYLE = {"axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False}
PANEL_IN, DPI = (2.7, 2.5), 130
COLOURS = "viridis"  # of steps and of widths, which have an order
Sizes = Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]


def coordinate_figure(kinds: Mapping[str, Sizes]) -> bytes:
    """Draw the change of the activations over the width: a row for each kind, a column for each place."""
    places = list(next(iter(kinds.values())))
    with matplotlib.rc_context(STYLE):
        size = (PANEL_IN[0] * len(places), PANEL_IN[1] * len(kinds))
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        panels = figure.subplots(len(kinds), len(places), sharex=True, sharey="col", squeeze=False)
        for row, (kind, of_kind) in zip(panels, kinds.items(), strict=True):
            for axes, place in zip(row, places, strict=True):
                widths = sorted(of_kind[place])
                steps = len(of_kind[place][widths[0]])
                for step in range(1, steps):
                    changes = [of_kind[place][width][step][1] for width in widths]
                    colour = matplotlib.colormaps[COLOURS](0.9 * step / steps)
                    axes.plot(widths, changes, marker=".", color=colour, label=f"step {step}")
                axes.set(xscale="log", yscale="log")
                axes.set_xticks(widths, [str(width) for width in widths])
                axes.minorticks_off()
                axes.set_title(f"{place}: width^{exponents(of_kind[place])[1]:+.2f}", fontsize=9)
            row[0].set_ylabel(f"{kind}\nRMS of the change")
        for axes in panels[-1]:
            axes.set_xlabel("hidden size")
        panels[0][-1].legend(fontsize=7, frameon=False)
        return _png(figure)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
