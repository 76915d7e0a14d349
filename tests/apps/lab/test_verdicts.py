"""Verdicts by simulation: how often each is reached at a true difference; power by another formula."""

import math

import numpy as np
import pytest

from megamoe.apps.lab.verdicts import (
    Verdict,
    chances,
    interval,
    judge,
    largest_spread,
    levels_of,
    seeds_for,
    seeds_more,
    smallest_difference,
)

SPREAD, MARGIN, DIFFERENCE, DRAWS = 0.8, 0.5, 1.0, 1000
NOISE = 3 * math.sqrt(0.05 * 0.95 / DRAWS)
PLANNED = seeds_for(("seen",), DIFFERENCE, SPREAD, MARGIN)
EQUAL = seeds_for(("equal",), 0.0, SPREAD, MARGIN)
LOOKS = [3, 5, 10]


def share(true: float, verdicts: set[Verdict], looks: dict[int, float], margin: float | None) -> float:
    """The share of studies that reach one of the verdicts at one of the looks (seeds and alpha)."""
    draws = np.random.default_rng(0).normal(true, SPREAD, (DRAWS, max(looks))).tolist()
    return float(
        np.mean(
            [
                any(judge(each[:n], margin, alpha).verdict in verdicts for n, alpha in looks.items())
                for each in draws
            ]
        )
    )


@pytest.mark.parametrize(
    ("true", "verdicts", "looks", "margin", "least", "most"),
    [
        (0.0, {"seen"}, {5: 0.05}, None, 0.0, 0.05),
        (0.0, {"seen", "opposite"}, {3: 0.05}, None, 0.0, 0.05 + NOISE),
        (DIFFERENCE, {"seen"}, {PLANNED: 0.05}, MARGIN, 0.8, 1.0),
        (MARGIN, {"equal"}, {10: 0.05}, MARGIN, 0.0, 0.05 + NOISE),
        (0.0, {"equal"}, {EQUAL: 0.05}, MARGIN, 0.8, 1.0),
        (0.0, {"seen", "opposite"}, levels_of(LOOKS), None, 0.0, 0.05 + NOISE),
        (MARGIN, {"equal"}, levels_of(LOOKS), MARGIN, 0.0, 0.05 + NOISE),
        (0.0, {"seen", "opposite"}, dict.fromkeys(LOOKS, 0.05), None, 0.08, 1.0),  # without alpha spending
    ],
)
def test_how_often_a_verdict_is_reached(
    true: float,
    verdicts: set[Verdict],
    looks: dict[int, float],
    margin: float | None,
    least: float,
    most: float,
) -> None:
    assert least <= share(true, verdicts, looks, margin) <= most


def test_the_interval_by_hand() -> None:
    """Differences 1, 1 and 1.3: mean 1.1, standard deviation 0.17321, t of 2 degrees of freedom 4.30265."""
    mean, low, high = interval([1.0, 1.0, 1.3])
    half = 4.302652729911275 * math.sqrt(0.03) / math.sqrt(3)
    assert mean == pytest.approx(1.1)
    assert (low, high) == (pytest.approx(1.1 - half), pytest.approx(1.1 + half))
    assert interval([2.0]) == (2.0, None, None) and interval([]) == (None, None, None)


def test_chances_are_those_of_the_noncentral_t_distribution_and_of_a_simulation() -> None:
    from scipy.stats import nct, t

    for seeds in (2, 3, 10):
        expected = nct.sf(t.ppf(0.975, seeds - 1), seeds - 1, 1.5 * math.sqrt(seeds))
        assert chances(1.5, 1.0, seeds)["seen"] == pytest.approx(expected, abs=1e-3)
    for verdict, chance in chances(0.3, SPREAD, 12, MARGIN).items():
        assert share(0.3, {verdict}, {12: 0.05}, MARGIN) == pytest.approx(chance, abs=0.03)
    difference = smallest_difference(0.4, 5)
    assert chances(difference, 0.4, 5)["seen"] == pytest.approx(0.8)
    assert seeds_for(("seen",), difference * 1.001, 0.4) == 5


def test_seeds_that_an_undecided_claim_needs() -> None:
    found = [0.5, -0.4, 0.1]
    alone, with_margin = seeds_more(found), seeds_more(found, 0.4)
    assert alone is not None and with_margin is not None and 3 < with_margin < alone
    decided = chances(float(np.mean(found)), float(np.std(found, ddof=1)), 3 + with_margin, 0.4)
    assert sum([*decided.values()]) >= 0.8
    assert seeds_more([0.01, -0.01]) is None and seeds_for(("seen",), 1.0, 0.0) is None
    assert largest_spread(1.0, 3) == pytest.approx(
        math.sqrt(2 / -math.log(0.8) / 2)
    )  # chi2 of 2: exponential
    assert sum(levels_of(LOOKS).values()) == pytest.approx(0.05)
