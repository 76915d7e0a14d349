"""The colours of the pages: any two curves can be told apart, also by the colour-blind, and each stands out.

Computed are CIEDE2000 (Sharma et al. 2005) of what readers without red, green or blue cones see (Machado et
al. 2009, severity 1.0), and the contrast to the background of WCAG 2.2 (3 for graphics, 4.5 for text).
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from megamoe.apps.report import figures, page
from megamoe.apps.report.palette import COLOURS, CURVES, DASHES, as_style, colour_of, nth_curve

LEAST_DIFFERENCE = 12.0  # about 2.3 is just noticeable between large patches; curves are thin and lie apart
SEEN_BY = {
    "all cones": np.eye(3),
    "no red (protanopia)": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green (deuteranopia)": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue (tritanopia)": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                   [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
PAGES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def linear(colour: str) -> np.ndarray:
    """The light of #rrggbb: linear red, green and blue."""
    levels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def lab(colour: str, cones: str = "all cones") -> np.ndarray:
    """CIE L*a*b* of what such a reader sees."""
    light = np.clip(SEEN_BY[cones] @ linear(colour), 0, 1)
    parts = TO_XYZ @ light / TO_XYZ.sum(axis=1)
    roots = np.where(parts > (6 / 29) ** 3, np.cbrt(parts), parts / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * roots[1] - 16, 500 * (roots[0] - roots[1]), 200 * (roots[1] - roots[2])])


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """CIEDE2000, equations 2 to 22 of Sharma et al. 2005."""
    mean_chroma = (np.hypot(*first[1:]) + np.hypot(*second[1:])) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean_chroma**7 / (mean_chroma**7 + 25.0**7))
    chroma = [np.hypot(stretch * it[1], it[2]) for it in (first, second)]
    hue = [np.degrees(np.arctan2(it[2], stretch * it[1])) % 360 for it in (first, second)]
    turn = (hue[1] - hue[0] + 180) % 360 - 180 if chroma[0] * chroma[1] else 0.0
    mean_hue = (hue[0] + turn / 2) % 360 if chroma[0] * chroma[1] else sum(hue)
    lightness, mean_chroma = (first[0] + second[0]) / 2, sum(chroma) / 2
    cosines = zip((-0.17, 0.24, 0.32, -0.20), (1, 2, 3, 4), (-30, 0, 6, -63), strict=True)
    weight = 1 + sum(part * np.cos(np.radians(times * mean_hue + by)) for part, times, by in cosines)
    by_lightness = (second[0] - first[0]) / (
        1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2)
    )
    by_chroma = (chroma[1] - chroma[0]) / (1 + 0.045 * mean_chroma)
    by_hue = 2 * np.sqrt(chroma[0] * chroma[1]) * np.sin(np.radians(turn / 2))
    by_hue /= 1 + 0.015 * mean_chroma * weight
    rotation = -np.sin(np.radians(60 * np.exp(-(((mean_hue - 275) / 25) ** 2))))
    rotation *= 2 * np.sqrt(mean_chroma**7 / (mean_chroma**7 + 25.0**7))
    return float(np.sqrt(by_lightness**2 + by_chroma**2 + by_hue**2 + rotation * by_chroma * by_hue))


def contrast(first: str, second: str) -> float:
    """WCAG 2.2: (lighter + 0.05) / (darker + 0.05) of the relative luminances."""
    high, low = sorted((TO_XYZ[1] @ linear(it) + 0.05 for it in (first, second)), reverse=True)
    return float(high / low)


def least_difference(colours: list[str]) -> float:
    """The smallest difference of two of the colours, over all readers."""
    return min(
        difference(lab(first, cones), lab(second, cones))
        for first, second in itertools.combinations(colours, 2)
        for cones in SEEN_BY
    )


@pytest.mark.parametrize(
    ("first", "second", "published"),  # of table 1
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, -0.0010, 2.4900), (50.0, 0.0009, -2.4900), 4.8045),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((50.0, 2.5, 0.0), (58.0, 24.0, 15.0), 19.4535),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ],
)
def test_the_difference_is_that_of_the_paper(
    first: tuple[float, ...], second: tuple[float, ...], published: float
) -> None:
    assert difference(np.array(first), np.array(second)) == pytest.approx(published, abs=1e-4)
    assert difference(np.array(second), np.array(first)) == pytest.approx(published, abs=1e-4)


def test_contrast_and_lightness_of_black_and_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0) and contrast("#777777", "#777777") == 1
    assert lab("#ffffff") == pytest.approx([100, 0, 0], abs=1e-3)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # the known limit for text


@PAGES
def test_any_two_curves_can_be_told_apart_by_every_reader(dark: bool) -> None:
    colours = [colour_of(name, dark) for name in CURVES]
    assert least_difference(colours) >= LEAST_DIFFERENCE


def test_colours_that_were_chosen_by_eye_would_fail() -> None:
    """Blue and purple are one colour without red cones, green and ochre nearly without blue ones."""
    assert least_difference(["#2c6fbb", "#d9632b", "#3b8f5a", "#8a5fbf", "#b8862b", "#4a9bb0"]) < 2


@PAGES
def test_curves_and_text_stand_out_from_their_background(dark: bool) -> None:
    card, behind = colour_of("background", dark), colour_of("page", dark)
    for colour in (*CURVES, *np.linspace(0, 1, 9)):
        assert contrast(colour_of(colour, dark), card) >= 3, colour
    for colour in ("text", "muted", "blue"):
        assert contrast(colour_of(colour, dark), card) >= 4.5, colour
        assert contrast(colour_of(colour, dark), behind) >= 4.5, colour


@PAGES
@pytest.mark.parametrize("cones", SEEN_BY)
def test_layers_get_darker_with_depth_for_every_reader(dark: bool, cones: str) -> None:
    found = [lab(colour_of(depth, dark), cones) for depth in np.linspace(0, 1, 9)]
    lightness = [it[0] for it in found]
    assert all(first > second + 1 for first, second in itertools.pairwise(lightness))
    assert min(difference(found[at], found[at + 4]) for at in (0, 4)) >= LEAST_DIFFERENCE


@PAGES
@pytest.mark.parametrize("cones", SEEN_BY)
def test_idle_even_and_overloaded_experts_differ_for_every_reader(dark: bool, cones: str) -> None:
    idle, even, overloaded = (lab(colour_of(it, dark), cones) for it in ("blue", "even", "overloaded"))
    assert min(difference(idle, even), difference(even, overloaded), difference(idle, overloaded)) > 30


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
    printed = style[style.index("@media print") :]
    assert re.findall("#[0-9a-f]{6}", style.replace(printed, "")) == []
    assert "screen and (prefers-color-scheme:dark)" in as_style(), "paper is white"
    assert COLOURS["even"][1] not in as_style().split("@media")[0]
