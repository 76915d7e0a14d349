"""Colours and settings of the charts, for a light and for a dark page."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Theme:
    """Colours of one kind of page."""

    background: str
    text: str
    muted: str
    grid: str
    blue: str
    orange: str
    further: tuple[str, ...]  # further validation sets
    depth: tuple[str, str, str]  # first, middle and last MoE layer
    load: tuple[str, str, str]  # idle, fair share, overloaded


LIGHT = Theme(
    background="#ffffff",
    text="#1f2430",
    muted="#6b7280",
    grid="#e8eaef",
    blue="#2c6fbb",
    orange="#d9632b",
    further=("#3b8f5a", "#8a5fbf", "#b8862b", "#4a9bb0"),
    depth=("#4fb8a0", "#2c6fbb", "#7a2c8f"),
    load=("#2c6fbb", "#f6f5f2", "#cf4a23"),
)
DARK = Theme(
    background="#171a21",
    text="#e6e8ee",
    muted="#9aa2b1",
    grid="#2a2f3a",
    blue="#6aaeea",
    orange="#f0925c",
    further=("#6fc08c", "#b595e0", "#dcb35c", "#79c6d8"),
    depth=("#6fd0b8", "#6aaeea", "#c58be0"),
    load=("#5aa7f0", "#23272f", "#f5814f"),
)


def colour_of(theme: Theme, colour: str | float) -> str:
    """Return a colour as #rrggbb: of a name (`blue`, `orange`, `further_0`), or of a depth from 0 to 1."""
    if isinstance(colour, str):
        name, _, place = colour.partition("_")
        found: str = theme.further[int(place)] if place else getattr(theme, name)
        return found
    first, second = (theme.depth[0], theme.depth[1]) if colour < 0.5 else (theme.depth[1], theme.depth[2])
    part = 2 * colour if colour < 0.5 else 2 * colour - 1
    mixed = (
        round(int(first[at : at + 2], 16) * (1 - part) + int(second[at : at + 2], 16) * part)
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{level:02x}" for level in mixed)


def chart_style(theme: Theme) -> Any:
    """Return the theme as matplotlib's settings, for `matplotlib.rc_context`."""
    return {
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.muted,
        "axes.titlecolor": theme.text,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "axes.titlepad": 7,
        "axes.labelsize": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.xmargin": 0.01,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.5,
        "lines.solid_capstyle": "round",
        "text.color": theme.text,
        "text.parse_math": False,  # a name with dollar signs is no formula
        "xtick.color": theme.grid,
        "ytick.color": theme.grid,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "figure.constrained_layout.h_pad": 0.08,
        "figure.constrained_layout.w_pad": 0.08,
        "figure.constrained_layout.hspace": 0.04,
        "figure.constrained_layout.wspace": 0.05,
    }
