"""The panels of a report as plotly figures (data and layout), and as the JSON that assets/page.js draws.

Imported only where a page is written: plotly takes 0.2 s, for which each rank would wait. The colours
are those of a light page; `twins` names the colour of a dark page for each of them.
"""

import base64
import gzip
import json
import math
from functools import cache
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from megamoe.apps.report.palette import COLOURS, colour_of
from megamoe.apps.report.panels import Colour, Curve, HeatMap, Panel, Section, as_text

DIGITS = 5  # significant, of a number in the page
MOST_UNIFIED = 9  # curves whose values are shown together under the pointer
BACKGROUND, TEXT, MUTED, GRID = (COLOURS[name][0] for name in ("background", "text", "muted", "grid"))


def as_json(sections: list[Section]) -> str:
    """Return {figures, template, dark} for a script element: what the page draws, and `twins`."""
    panels = [panel for section in sections for panel in section.panels]
    figures = [_plain(figure_of(panel)) for panel in panels]
    template = _plain(go.Figure(layout=_shared_layout()))["layout"]
    content = {"figures": figures, "template": {"layout": template}, "dark": twins(panels)}
    # In a script element only `<` could end the element or open a comment.
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _plain(figure: go.Figure) -> dict[str, Any]:
    """Return data and layout without plotly's default template, which is 7 KB a figure."""
    figure.layout.template = None
    return figure.to_plotly_json()


def twins(panels: list[Panel]) -> dict[str, str]:
    """Return the dark page's colour for each colour that the panels have on a light page."""
    colours: set[Colour] = {curve.colour for panel in panels for curve in panel.curves}
    return {colour_of(colour): colour_of(colour, dark=True) for colour in colours | set(COLOURS)}


def figure_of(panel: Panel) -> go.Figure:
    """Return the figure of a panel; `_shared_layout` has what all figures share."""
    heat_map, traces = panel.heat_map, []
    for curve, following in zip(panel.curves, [*panel.curves[1:], None], strict=False):
        entry = following if curve.faint and following is not None else curve
        traces += _traces(curve, as_text(entry.name))
    if heat_map is not None:
        traces.append(_heat_map(heat_map, panel.y.split(" (")[0]))
    unified = heat_map is None and len(panel.curves) <= MOST_UNIFIED
    figure = go.Figure(traces)
    figure.update_layout(
        hovermode="x unified" if unified else "closest",
        hoverdistance=-1 if unified else 20,  # -1: the nearest step, however far
    )
    figure.update_xaxes(title_text=panel.x)
    figure.update_yaxes(title_text=panel.y)
    if panel.limits is not None:
        figure.update_yaxes(range=list(panel.limits))
    if panel.level is not None:
        figure.add_hline(panel.level, line={"color": MUTED, "width": 1, "dash": "dash"})
    if heat_map is not None:
        figure.update_layout(plot_bgcolor=GRID)
        figure.update_xaxes(showgrid=False)
        figure.update_yaxes(showgrid=False, tickformat="d", nticks=8)
    return figure


def _traces(curve: Curve, entry: str) -> list[go.Scatter]:
    """Return the traces of a curve. entry: of the legend, which shows and hides them together."""
    colour, x, name = colour_of(curve.colour), _numbers(curve.x), as_text(curve.name)
    traces = []
    if curve.low is not None and curve.high is not None:
        edge: dict[str, Any] = {"x": x, "mode": "lines", "line": {"width": 0}, "name": name}
        edge |= {"legendgroup": entry, "showlegend": False, "hoverinfo": "skip"}
        traces.append(go.Scatter(edge, y=_numbers(curve.low)))
        traces.append(go.Scatter(edge, y=_numbers(curve.high), fill="tonexty", fillcolor=f"{colour}33"))
    line = go.Scatter(
        x=x,
        y=_numbers(curve.y),
        name=name,
        legendgroup=entry,
        mode="lines+markers" if curve.points else "lines",
        line_color=colour,
        line_width=1 if curve.faint else 1.8,
        line_dash=curve.dash,
        opacity=0.45 if curve.faint else 1,
        showlegend=curve.named and not curve.faint,
        hovertemplate="%{y:.5~g}" + " at %{x}" * curve.points + "<extra>%{fullData.name}</extra>",
    )
    if curve.low is not None and curve.high is not None and curve.deviation is not None:
        spread = zip(curve.deviation, curve.low, curve.high, strict=True)
        line.customdata = [_numbers(values) for values in spread]
        line.hovertemplate = (
            "%{y:.5~g} ± %{customdata[0]:.2~g}, from %{customdata[1]:.5~g} to %{customdata[2]:.5~g}"
            "<extra>%{fullData.name}</extra>"
        )
    return [*traces, line]


def _heat_map(heat_map: HeatMap, row: str) -> go.Heatmap:
    if heat_map.scale == "load":
        places = {"blue": 0.0, "even": 1 / heat_map.highest, "overloaded": 1.0}
        scale = [(place, colour_of(name)) for name, place in places.items()]
    else:
        scale = [(0.0, BACKGROUND), (1.0, colour_of("blue"))]
    title = {"text": heat_map.value, "side": "right", "font": {"size": 11}}
    return go.Heatmap(
        x=_numbers(heat_map.edges_B),
        z=[_numbers(values, 3) for values in heat_map.values_EB.tolist()],
        zmin=0,
        zmax=heat_map.highest,
        colorscale=scale,
        colorbar={"title": title, "thickness": 9, "outlinewidth": 0, "tickfont": {"size": 10}, "nticks": 5},
        hovertemplate=f"step %{{x}}<br>{row} %{{y}}<br>%{{z:.3~g}}<extra></extra>",
        hoverongaps=False,
    )


def _shared_layout() -> dict[str, Any]:
    axis = {
        "gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True,
        "tickfont": {"size": 11}, "title": {"font": {"size": 12}, "standoff": 8}, "nticks": 7,
    }  # fmt: skip
    clear = "rgba(0,0,0,0)"
    return {
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "font": {"color": MUTED, "size": 12},
        "margin": {"l": 56, "r": 12, "t": 8, "b": 40},
        "showlegend": False,  # the page has its own; a saved picture has this one
        "xaxis": axis,
        "yaxis": axis,
        "legend": {
            "orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom", "font": {"size": 11}, "itemwidth": 30,
        },
        "hoverlabel": {
            "bgcolor": BACKGROUND, "bordercolor": GRID, "font": {"color": TEXT},
        },
        "modebar": {"bgcolor": clear, "color": MUTED, "activecolor": colour_of("blue")},
    }  # fmt: skip


def _numbers(values: Any, digits: int = DIGITS) -> list[float | int | None]:
    """Return the numbers as they are written: whole ones with all digits, None for what is not finite."""
    found: list[float | int | None] = []
    for value in values:
        if not math.isfinite(value):
            found.append(None)
        elif value == int(value) and abs(value) < 1e15:
            found.append(int(value))
        else:
            found.append(float(f"{value:.{digits}g}"))
    return found


@cache
def library() -> str:
    """Return plotly.js, as it ships inside plotly's package: gzip in base64."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
