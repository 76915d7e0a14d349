"""What a report draws: sections of panels, each with curves or a heat map, without a library's drawing calls.

`figures` makes plotly figures of them. Arrays indexed by record end in _R,
by row of a heat map in _E, by its column in _B.
"""

from dataclasses import dataclass, field
from html import escape

import numpy as np

STEP_AXIS = "step (optimiser steps)"
LARGEST = 1e30  # that is drawn: beside 1e308 the limits of an axis overflow
MOST_RAW, MOST_POINTS = 1000, 400  # points of a curve as recorded, and of a smoothed one
Colour = str | float  # a name in `palette.COLOURS`, or the depth of a layer from 0 (first) to 1 (last)


@dataclass(frozen=True)
class Curve:
    """A curve over the x axis; values that are not finite leave a gap.

    faint: the recorded values behind the smoothed curve that follows. points: mark each value. named: shown
    in the legend. dash: one of `palette.DASHES`. low, high: the band around the curve, and deviation: the
    standard deviation of the sample that y is the mean of; as long as the curve.
    """

    name: str
    x: list[float]
    y: list[float]
    colour: Colour
    faint: bool = False
    points: bool = False
    named: bool = True
    dash: str = "solid"
    low: list[float] | None = None
    high: list[float] | None = None
    deviation: list[float] | None = None


@dataclass(frozen=True)
class HeatMap:
    """Coloured cells: column b reaches from edges_B[b] to edges_B[b + 1], row e is centred on e.

    value: what the colours mean, with its unit. scale: `load` has its middle colour at 1, `share` begins
    at 0 with the background. highest: the value of the last colour.
    """

    edges_B: list[float]
    values_EB: np.ndarray
    value: str
    scale: str
    highest: float


@dataclass(frozen=True)
class Panel:
    """One pair of axes. x and y name the axes with their units.

    keys: of the metrics that it draws; `moe/<layer>/imbalance` is that of every layer. limits: of the y axis;
    None: those of the data. level: the value of a dashed line for orientation.
    """

    title: str
    y: str
    curves: list[Curve] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    heat_map: HeatMap | None = None
    x: str = STEP_AXIS
    limits: tuple[float, float] | None = None
    level: float | None = None


@dataclass(frozen=True)
class Section:
    """Panels under a title, with a sentence that explains them."""

    title: str
    note: str
    panels: list[Panel]
    wide: bool = False  # a panel fills the width


def as_text(name: str) -> str:
    """Return a name as plotly.js shows it unchanged: it reads a few HTML tags in names."""
    return escape(name.encode(errors="backslashreplace").decode(), quote=False)


def raw_and_smoothed(steps: list[int], values: list[float], colour: Colour, name: str = "") -> list[Curve]:
    """Return the recorded values as a faint curve and their moving average; as points if they are few."""
    few = len(steps) <= 3
    y = clipped(values) if few else smooth(values)
    names = (f"{name}, each step", f"{name} (smoothed)") if name else ("each step", "smoothed")
    raw = [] if few else [Curve(names[0], *envelope(steps, values), colour, True, named=False)]
    x, y_thin = thin(steps, y)
    return [*raw, Curve((name or "each step") if few else names[1], x, y_thin, colour, points=few)]


def clipped(values: list[float]) -> np.ndarray:
    """Return the values in the range that can be drawn; NaN stays."""
    return np.clip(np.asarray(values, dtype=float), -LARGEST, LARGEST)


def smooth(values: list[float]) -> np.ndarray:
    """Return the centred moving average over about a thirtieth of the values. Non-finite values are skipped.

    The window shrinks towards both ends, to a third: the curve neither lags behind a fall nor bends
    much at the edges.
    """
    values_R = np.asarray(values, dtype=float)
    finite_R = np.isfinite(values_R)
    at = np.arange(len(values_R))
    half = max(2, len(values_R) // 60)
    half_R = np.clip(np.minimum(at, at[::-1]), half // 3, half)
    # Beside a larger value the running sum would lose all the others.
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite_R, np.clip(values_R, -1e9, 1e9), 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite_R)])
    begin_R, end_R = np.maximum(at - half_R, 0), np.minimum(at + half_R + 1, len(values_R))
    num_finite_R = counts[end_R] - counts[begin_R]
    return (sums[end_R] - sums[begin_R]) / np.where(num_finite_R == 0, np.nan, num_finite_R)


def thin(x: list[int], values: np.ndarray | list[float]) -> tuple[list[float], list[float]]:
    """Return at most MOST_POINTS evenly spaced records, the first and the last among them."""
    if len(x) <= MOST_POINTS:
        return [float(it) for it in x], clipped(list(values)).tolist()
    kept = np.linspace(0, len(x) - 1, MOST_POINTS).round().astype(int)
    return np.asarray(x, dtype=float)[kept].tolist(), clipped(list(values))[kept].tolist()


def envelope(x: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    """Return at most MOST_RAW records: the lowest and the highest of neighbouring ones; spikes stay."""
    values_R = clipped(values)
    if len(x) <= MOST_RAW:
        return [float(it) for it in x], values_R.tolist()
    kept: set[int] = set()
    for members in np.array_split(np.arange(len(x)), MOST_RAW // 2):
        part = values_R[members]
        low, high = np.where(np.isnan(part), np.inf, part), np.where(np.isnan(part), -np.inf, part)
        kept |= {int(members[low.argmin()]), int(members[high.argmax()])}
    order = sorted(kept)
    return np.asarray(x, dtype=float)[order].tolist(), values_R[order].tolist()


def spike_limits(values: list[float]) -> tuple[float, float] | None:
    """Return the limits of a y axis that leave out rare spikes; None without a finite value.

    A constant is drawn in the middle of an axis from 0, and a constant 0 at the foot of one up to 1.
    """
    finite = clipped(values)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return None
    if np.ptp(finite) <= 1e-9 * abs(finite[0]):
        low, high = sorted((0.0, 2.0 * float(finite[0]) or 1.0))
        return low, high
    low, high = np.quantile(finite, [0.0, 0.99])
    high = max(high, min(float(finite[:3].max()), 3 * high))  # a loss starts high, and that is no spike
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return float(low - margin), float(high + margin)
