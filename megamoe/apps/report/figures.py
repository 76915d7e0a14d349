"""The panels of a report as plotly figures (data and layout), and as the JSON that assets/page.js draws.

Imported only where a page is written: plotly takes 0.2 s, for which each rank would wait. The colours
are those of a light page; `twins` names the colour of a dark page for each of them.
"""

import base64
import gzip
import json
import math
from functools import cache
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from megamoe.apps.report.panels import Colour, Curve, HeatMap, Panel, Section

DIGITS = 5  # significant, of a number in the page
MOST_UNIFIED = 9  # curves whose values are shown together under the pointer


COLOURS = {  # of a light and of a dark page
    "background": ("#ffffff", "#171a21"),
    "text": ("#1f2430", "#e6e8ee"),
    "muted": ("#6b7280", "#9aa2b1"),
    "grid": ("#e8eaef", "#2a2f3a"),
    "blue": ("#2c6fbb", "#6aaeea"),
    "orange": ("#d9632b", "#f0925c"),
    "further_0": ("#3b8f5a", "#6fc08c"),  # further validation sets
    "further_1": ("#8a5fbf", "#b595e0"),
    "further_2": ("#b8862b", "#dcb35c"),
    "further_3": ("#4a9bb0", "#79c6d8"),
    "even": ("#f6f5f2", "#23272f"),  # a fair share of the load; idle experts are blue
    "overloaded": ("#cf4a23", "#f5814f"),
}
DEPTH = (("#4fb8a0", "#2c6fbb", "#7a2c8f"), ("#6fd0b8", "#6aaeea", "#c58be0"))  # first, middle, last layer
BACKGROUND, TEXT, MUTED, GRID = (COLOURS[name][0] for name in ("background", "text", "muted", "grid"))


def colour_of(colour: Colour, dark: bool = False) -> str:
    """Return a colour as #rrggbb: of a name in COLOURS, or of a layer's depth from 0 (first) to 1 (last)."""
    if isinstance(colour, str):
        return COLOURS[colour][dark]
    pair = DEPTH[dark][:2] if colour < 0.5 else DEPTH[dark][1:]
    part = 2 * colour - (colour >= 0.5)
    levels = ([int(it[at : at + 2], 16) for it in pair] for at in (1, 3, 5))
    return "#" + "".join(f"{round(low * (1 - part) + high * part):02x}" for low, high in levels)


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
    found: dict[str, Any] = figure.to_plotly_json()
    return found


def twins(panels: list[Panel]) -> dict[str, str]:
    """Return the dark page's colour for each colour that the panels have on a light page."""
    colours: set[Colour] = {curve.colour for panel in panels for curve in panel.curves}
    return {colour_of(colour): colour_of(colour, dark=True) for colour in colours | set(COLOURS)}


def figure_of(panel: Panel) -> go.Figure:
    """Return the figure of a panel; `_shared_layout` has what all figures share."""
    heat_map, named = panel.heat_map, sum(curve.named and not curve.faint for curve in panel.curves)
    traces = [trace for curve in panel.curves for trace in _traces(curve)]
    if heat_map is not None:
        traces.append(_heat_map(heat_map, panel.y.split(" (")[0]))
    unified = heat_map is None and len(panel.curves) <= MOST_UNIFIED
    figure = go.Figure(traces)
    figure.update_layout(
        margin={"t": 4 if named > 1 else 8},
        showlegend=named > 1,
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


def _traces(curve: Curve) -> list[go.Scatter]:
    colour, x, name = colour_of(curve.colour), _numbers(curve.x), _text(curve.name)
    traces = []
    if curve.low is not None and curve.high is not None:
        edge: dict[str, Any] = {"x": x, "mode": "lines", "line": {"width": 0}, "name": name}
        edge |= {"legendgroup": name, "showlegend": False, "hoverinfo": "skip"}
        traces.append(go.Scatter(edge, y=_numbers(curve.low)))
        traces.append(go.Scatter(edge, y=_numbers(curve.high), fill="tonexty", fillcolor=f"{colour}33"))
    line = go.Scatter(
        x=x,
        y=_numbers(curve.y),
        name=name,
        legendgroup=name,
        mode="lines+markers" if curve.points else "lines",
        line_color=colour,
        line_width=1 if curve.faint else 1.8,
        line_dash="dash" if curve.dashed else "solid",
        opacity=0.45 if curve.faint else 1,
        showlegend=curve.named and not curve.faint,
        hovertemplate="%{y:.5~g}<extra>%{fullData.name}</extra>",
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
        "tickfont": {"size": 11}, "title": {"font": {"size": 12}}, "nticks": 7,
    }  # fmt: skip
    clear = "rgba(0,0,0,0)"
    return {
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "font": {"color": MUTED, "size": 12},
        "margin": {"l": 56, "r": 8, "b": 44},
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


def _text(text: str) -> str:
    """Return a name as plotly.js shows it unchanged: it reads a few HTML tags in names."""
    return escape(text.encode(errors="backslashreplace").decode(), quote=False)


@cache
def library() -> str:
    """Return plotly.js, as it ships inside plotly's package: gzip in base64."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
