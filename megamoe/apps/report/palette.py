"""The colours of the pages, of a light and of a dark one.

Any two curves can be told apart, also by readers who see no red, no green or no blue (Machado et al. 2009):
CIEDE2000 is at least 12 between them (tests/apps/report/test_palette.py in commit 90c74a9d computes it).
"""

from megamoe.apps.report.panels import Colour

COLOURS = {  # of a light and of a dark page
    "page": ("#f3f4f7", "#0f1116"),
    "background": ("#ffffff", "#171a21"),
    "text": ("#1f2430", "#e6e8ee"),
    "muted": ("#5f6673", "#9aa2b1"),
    "grid": ("#e8eaef", "#2a2f3a"),
    "blue": ("#0064b4", "#5086d0"),
    "orange": ("#9e2f12", "#e15029"),
    "further_0": ("#099e8a", "#6fffe4"),
    "further_1": ("#878bce", "#b9bafb"),
    "further_2": ("#bc7a00", "#faa500"),
    "further_3": ("#004d41", "#36b9a4"),
    "even": ("#f6f5f2", "#23272f"),  # a fair share of the load; idle experts are blue
    "overloaded": ("#b3361b", "#e15029"),
}
CURVES = ("blue", "orange", "further_0", "further_1", "further_2", "further_3")  # in the order of a legend
DASHES = ("solid", "dash", "dot", "dashdot")  # of the first six curves, of the next six, ...
DEPTH = (("#2f9d84", "#0064b4", "#3d0a52"), ("#c9f2cf", "#6aaeea", "#9a5fd0"))  # first, middle, last layer


def nth_curve(place: int) -> tuple[str, str]:
    """Return the colour and the dash of the curve at this place of a legend."""
    return CURVES[place % len(CURVES)], DASHES[place // len(CURVES) % len(DASHES)]


def colour_of(colour: Colour, dark: bool = False) -> str:
    """Return a colour as #rrggbb: of a name in COLOURS, or of a layer's depth from 0 (first) to 1 (last)."""
    if isinstance(colour, str):
        return COLOURS[colour][dark]
    pair = DEPTH[dark][:2] if colour < 0.5 else DEPTH[dark][1:]
    part = 2 * colour - (colour >= 0.5)
    levels = ([int(it[at : at + 2], 16) for it in pair] for at in (1, 3, 5))
    return "#" + "".join(f"{round(low * (1 - part) + high * part):02x}" for low, high in levels)


def as_style() -> str:
    """Return the colours as properties of CSS: `--blue`, and those of the reader's dark setting."""
    light, dark = (
        "".join(f"--{name}:{pair[at]};" for name, pair in COLOURS.items() if "_" not in name) for at in (0, 1)
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
