"""The HTML around the charts: sections, legends whose entries are buttons, definitions of the metrics.

assets/page.js draws a figure into each `.plot`, and hides the curves whose buttons are not pressed.
"""

import re
from html import escape

from megamoe.apps.report.palette import colour_of
from megamoe.apps.report.panels import Curve, Panel, Section, as_text
from megamoe.metrics import names

LOGARITHMIC = '<button type="button" class="log" id="log-{}" aria-pressed="false">log axis</button>'
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
CODE = re.compile("`([^`]+)`")
LOAD = ". n_i is the load of expert i: the (token, expert) pairs that it computed in the step"


def charts(sections: list[Section]) -> list[str]:
    """Return the HTML of the sections; figures are numbered in the order of their panels."""
    found, number = [], 0
    for at, section in enumerate(sections):
        shared = shared_legend(section)
        figures = []
        for panel in section.panels:
            figures.append(_figure(section, panel, number, [] if shared else legend_of(panel)))
            number += 1
        kind = "panels whole" if section.wide else "panels"
        button = LOGARITHMIC.format(at) if any(panel.curves for panel in section.panels) else ""
        found.append(
            f'<section class="charts" id="section-{at}"><h2>{escape(section.title)}</h2>'
            f"<p>{escape(section.note)}</p>{button}{_legend(shared, f'section-{at}')}"
            f'<div class="{kind}">{"".join(figures)}</div></section>'
        )
    return found


def navigation(sections: list[Section]) -> str:
    """Return links to the sections, if there are several."""
    links = [f'<a href="#section-{at}">{escape(it.title)}</a>' for at, it in enumerate(sections)]
    return f'<nav aria-label="Sections">{"".join(links)}</nav>' if len(links) > 1 else ""


def legend_of(panel: Panel) -> list[Curve]:
    """Return the curves that the legend of a panel names; none if there is but one."""
    named = [curve for curve in panel.curves if curve.named and not curve.faint]
    return named if len(named) > 1 else []


def shared_legend(section: Section) -> list[Curve]:
    """Return the one legend of a section's panels; none if they differ, or there is but one panel."""
    legends = [legend_of(panel) for panel in section.panels if panel.curves]
    looks = {tuple((it.name, it.colour, it.dash) for it in legend) for legend in legends}
    return legends[0] if len(legends) > 1 and len(looks) == 1 else []


def _figure(section: Section, panel: Panel, number: int, legend: list[Curve]) -> str:
    name = escape(f"{section.title}: {panel.title}")
    return (
        f"<figure><figcaption>{escape(panel.title)}</figcaption>{definition(panel, name)}"
        f'{_legend(legend, name)}<div class="plot" id="{name}" data-figure="{number}" role="img" '
        f'aria-label="{name}, {escape(panel.y)} by {escape(panel.x)}"></div></figure>'
    )


def _legend(curves: list[Curve], name: str) -> str:
    """Return a button for each curve, which shows and hides it."""
    if not curves:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" id="{name}: {escape(it.name)}" '
        f'data-curve="{escape(as_text(it.name))}"><i class="{it.dash}{" points" * it.points}" '
        f'style="--light:{colour_of(it.colour)};--dark:{colour_of(it.colour, dark=True)}"></i>'
        f"{escape(it.name)}</button>"
        for it in curves
    )
    return f'<div class="legend" role="group" aria-label="Curves shown">{buttons}</div>'


def definition(panel: Panel, name: str) -> str:
    """Return what the panel's metrics mean, as docs/run/metrics.md says it, to be opened; may be empty."""
    rows = []
    for key in panel.keys:
        if (metric := names.metric_of(key)) is not None:
            unit = "" if metric.unit == "1" else f" ({escape(metric.unit)})"
            formula = f"{metric.formula} ({metric.logged}){LOAD * ('n_i' in metric.formula)}"
            text = CODE.sub(r"<code>\1</code>", escape(LINK.sub(r"\1", formula)))
            rows.append(f"<dt><code>{escape(key)}</code>{unit}</dt><dd>{text}</dd>")
    if not rows:
        return ""
    return (
        f'<details class="definition" id="definition of {name}">'
        f'<summary aria-label="definition of {escape(panel.title)}">definition</summary>'
        f"<dl>{''.join(rows)}</dl></details>"
    )
