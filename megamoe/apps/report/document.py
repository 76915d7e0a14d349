"""The HTML document of a report: one file without network, with plotly.js, styles, data and a picture inside.

The panels' data are JSON; `assets/page.js` draws them. Without JavaScript the picture is shown instead.
plotly.js is the "cartesian" partial bundle (MIT), unchanged: the "basic" one has no heat maps.
"""

import base64
import json
import math
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from megamoe.apps.report.panels import Curve, Panel, Section
from megamoe.apps.report.themes import DARK, LIGHT, Theme, colour_of

ASSETS = Path(__file__).parent / "assets"
LIBRARY = "plotly-cartesian.min.js"
DIGITS = 5  # significant, of a number in the page

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
 style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src $connect">
<title>$title</title>
<style>$style</style>
<noscript><style>.charts { display: none; }</style></noscript>
</head>
<body$live>
$main
<script>$library</script>
<script>$script</script>
</body>
</html>
""")


def document(title: str, main: str, live_s: float | None = None) -> str:
    """Return the page around its `<main>`. live_s: seconds between refreshes of a served page."""
    return PAGE.substitute(
        title=escape(title),
        style=_asset("page.css"),
        live="" if live_s is None else f' data-live="{live_s:g}"',
        connect="'none'" if live_s is None else "'self'",
        main=main,
        library=_asset(LIBRARY),
        script=_asset("page.js"),
    )


def main_of(heading: str, subtitle: str, parts: list[str], sections: list[Section], png: bytes | None) -> str:
    """Return the `<main>` of a page.

    parts: HTML before the sections. png: the same sections as a picture, for browsers without JavaScript.
    """
    return "\n".join(
        [
            f"<main><header><h1>{escape(heading)}</h1><p>{escape(subtitle)}</p>",
            '<p id="told" role="status"></p></header>',
            *parts,
            *_charts(sections),
            _without_script(bool(sections), png),
            f'<script type="application/json" id="panels">{_as_json(sections)}</script>',
            "</main>",
        ]
    )


def table(rows: list[list[str]], head: list[str] | None = None) -> str:
    """Return an HTML table whose rows begin with their header; `head` names the columns."""
    lines = [] if head is None else ["<tr>" + "".join(f"<th>{escape(it)}</th>" for it in head) + "</tr>"]
    for first, *others in rows:
        cells = "".join(
            f'<td class="long">{escape(it)}</td>' if len(it) > 24 else f"<td>{escape(it)}</td>"
            for it in others
        )
        lines.append(f"<tr><th>{escape(first)}</th>{cells}</tr>")
    kind = "facts" if head is None else "wide"
    return f'<div class="table"><table class="{kind}">\n' + "\n".join(lines) + "\n</table></div>"


def _charts(sections: list[Section]) -> list[str]:
    found, number = [], 0
    for at, section in enumerate(sections):
        figures = []
        for panel in section.panels:
            name = escape(f"{section.title}: {panel.title}")
            figures.append(
                f'<figure><figcaption>{escape(panel.title)}</figcaption><div class="plot" id="{name}" '
                f'role="img" aria-label="{name}, {escape(panel.y)} by {escape(panel.x)}" '
                f'data-panel="{number}"></div></figure>'
            )
            number += 1
        kind = "panels whole" if section.wide else "panels"
        logarithmic = '<button type="button" class="log" id="log-{}" aria-pressed="false">log axis</button>'
        button = logarithmic.format(at) if any(panel.curves for panel in section.panels) else ""
        found.append(
            f'<section class="charts"><h2>{escape(section.title)}</h2><p>{escape(section.note)}</p>{button}'
            f'<div class="{kind}">{"".join(figures)}</div></section>'
        )
    return found


def _without_script(has_charts: bool, png: bytes | None) -> str:
    if not has_charts:
        return ""
    line = "The charts need JavaScript" + ("; this is a picture of them." if png else ".")
    image = ""
    if png:
        data = base64.b64encode(png).decode()
        image = f'<img src="data:image/png;base64,{data}" alt="All charts of the report">'
    return f"<noscript><section><p>{line}</p>{image}</section></noscript>"


def _as_json(sections: list[Section]) -> str:
    """Return what page.js reads: panels, x values shared by curves, and the colours of both themes."""
    x_values: dict[tuple[float, ...], int] = {}
    panels = [_panel(panel, x_values) for section in sections for panel in section.panels]
    content = {
        "panels": panels,
        "x": [_numbers(x) for x in x_values],
        "themes": {"light": _colours(LIGHT), "dark": _colours(DARK)},
    }
    # In a script element only `<` could end the element or open a comment.
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _colours(theme: Theme) -> dict[str, Any]:
    names = ("background", "text", "muted", "grid", "blue", "load")
    return {name: getattr(theme, name) for name in names}


def _panel(panel: Panel, x_values: dict[tuple[float, ...], int]) -> dict[str, Any]:
    heat_map = panel.heat_map
    return {
        "title": _text(panel.title),
        "x": panel.x,
        "y": panel.y,
        "limits": panel.limits,
        "level": panel.level,
        "curves": [_curve(curve, x_values) for curve in panel.curves],
        "map": None
        if heat_map is None
        else {
            "x": _numbers(heat_map.edges_B),
            "z": [_numbers(row, 3) for row in heat_map.values_EB.tolist()],
            "value": heat_map.value,
            "scale": heat_map.scale,
            "highest": heat_map.highest,
        },
    }


def _curve(curve: Curve, x_values: dict[tuple[float, ...], int]) -> dict[str, Any]:
    return {
        **vars(curve),
        "name": _text(curve.name),
        "x": x_values.setdefault(tuple(curve.x), len(x_values)),
        "y": _numbers(curve.y),
        "colour": [colour_of(theme, curve.colour) for theme in (LIGHT, DARK)],
        "low": None if curve.low is None else _numbers(curve.low),
        "high": None if curve.high is None else _numbers(curve.high),
    }


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
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
