"""The colours of the pages stand out from their background (WCAG 2.2: 3 for graphics, 4.5 for text)."""

import re
from pathlib import Path

import numpy as np
import pytest

from megamoe.apps.report import figures, page
from megamoe.apps.report.palette import COLOURS, CURVES, DASHES, as_style, colour_of, nth_curve

LUMINANCE = np.array([0.2126729, 0.7151522, 0.0721750])  # of linear red, green and blue
PAGES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def linear(colour: str) -> np.ndarray:
    """The light of #rrggbb: linear red, green and blue."""
    levels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """WCAG 2.2: (lighter + 0.05) / (darker + 0.05) of the relative luminances."""
    high, low = sorted((LUMINANCE @ linear(it) + 0.05 for it in (first, second)), reverse=True)
    return float(high / low)


def test_contrast_of_black_and_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0) and contrast("#777777", "#777777") == 1
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # the known limit for text


@PAGES
def test_curves_and_text_stand_out_from_their_background(dark: bool) -> None:
    card, behind = colour_of("background", dark), colour_of("page", dark)
    for colour in (*CURVES, *np.linspace(0, 1, 9)):
        assert contrast(colour_of(colour, dark), card) >= 3, colour
    for colour in ("text", "muted", "blue"):
        assert contrast(colour_of(colour, dark), card) >= 4.5, colour
        assert contrast(colour_of(colour, dark), behind) >= 4.5, colour


def test_the_looks_of_a_legend_repeat_after_twenty_four_curves() -> None:
    assert len({nth_curve(place) for place in range(24)}) == 24
    assert nth_curve(0) == ("blue", "solid") and nth_curve(6) == ("blue", "dash")
    style = Path(page.ASSETS / "page.css").read_text()
    assert all(f".legend i.{dash} " in style for dash in DASHES if dash != "solid")


def test_the_style_has_the_colours_of_the_figures_and_no_others() -> None:
    style = (page.ASSETS / "page.css").read_text()
    used = set(re.findall(r"var\(--(\w+)\)", style)) - {"light", "dark", "colour"}
    defined = dict(re.findall(r"--(\w+):(#\w{6})", as_style().split("@media")[0]))
    assert used <= defined.keys()
    assert defined["background"] == figures.BACKGROUND and defined["muted"] == figures.MUTED
    assert re.findall("#[0-9a-f]{6}", style) == []
    assert COLOURS["even"][1] not in as_style().split("@media")[0]
