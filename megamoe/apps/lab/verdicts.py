"""What paired differences over seeds decide, how many seeds that takes, and looks in between.

    judge([0.31, 0.28, 0.35])                              # verdict "seen"
    judge([0.01, -0.02, 0.01], margin=0.1)                 # verdict "equal"
    seeds_for(("seen",), true=0.1, spread=0.08)            # 8 seeds: seen in 80 % of cases
    smallest_difference(spread=0.08, seeds=3)              # 0.26: what three seeds show in 80 % of cases
    [judge(values[:n], alpha=alpha) for n, alpha in levels_of([3, 5, 10]).items()]

A difference is a number for each seed, above 0 where it supports the claim; `claims.decide` makes them of
a claim. With a margin, the verdict is equal if two one-sided t tests, each at the level alpha, reject that
the true mean lies at or beyond -margin and margin. Else it is seen or opposite if the two-sided interval of
1 - alpha of the mean (Student's t, with one degree of freedom less than there are seeds) lies above or
below 0, and else undecided. So a difference that is surely there, and surely less than the margin, is equal.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Literal

import numpy as np

Verdict = Literal["seen", "opposite", "equal", "undecided", "not measured"]
ALPHA, POWER = 0.05, 0.8
DECIDED: tuple[Verdict, ...] = ("seen", "opposite", "equal")
MOST_SEEDS = 1000
SPREADS = 400  # points at which the distribution of the spread found is integrated


@dataclass(frozen=True)
class Judgement:
    """What differences decide.

    low, high: the ends of the mean's two-sided interval; None of fewer than two seeds.
    """

    verdict: Verdict
    mean: float | None = None
    low: float | None = None
    high: float | None = None


def judge(differences: Sequence[float], margin: float | None = None, alpha: float = ALPHA) -> Judgement:
    """Return what finite differences decide; see the module.

    margin: in the unit of the differences; None: nothing is equal. alpha: the error of the claim; that of one
    look if there are several, see `levels_of`.
    """
    mean, low, high = interval(differences, alpha)
    if mean is None or low is None or high is None:
        return Judgement("not measured" if mean is None else "undecided", mean)
    if margin is not None and abs(mean) + _half(differences, 2 * alpha) < margin:
        return Judgement("equal", mean, low, high)
    return Judgement("seen" if low > 0 else "opposite" if high < 0 else "undecided", mean, low, high)


def seeds_more(differences: Sequence[float], margin: float | None = None, alpha: float = ALPHA) -> int | None:
    """Return how many seeds more would decide what two or more do not, in 80 % of cases, if the mean and the
    spread found were the true ones; None: not within `MOST_SEEDS`.
    """
    seeds = len(differences)
    needed = seeds_for(DECIDED, fmean(differences), stdev(differences), margin, alpha, least=seeds + 1)
    return None if needed is None else needed - seeds


def interval(
    values: Sequence[float], alpha: float = ALPHA
) -> tuple[float | None, float | None, float | None]:
    """Return the mean and the two ends of its interval of 1 - alpha; None where there are too few values."""
    if not values:
        return None, None, None
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = _half(values, alpha)
    return mean, mean - half, mean + half


def _half(values: Sequence[float], alpha: float) -> float:
    """Return half of the length of the mean's two-sided interval."""
    return _quantile(1 - alpha / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))


@cache
def _quantile(share: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf(share, degrees))


def chances(
    true: float, spread: float, seeds: int, margin: float | None = None, alpha: float = ALPHA
) -> dict[Verdict, float]:
    """Return the probability of each verdict that decides, of normally distributed differences.

    true: their mean; spread: their standard deviation, above 0. Integrated over the distribution of the
    standard deviation found.
    """
    from scipy.stats import chi2, norm

    error, degrees = spread / math.sqrt(seeds), seeds - 1
    found = np.sqrt(chi2.ppf((np.arange(SPREADS) + 0.5) / SPREADS, degrees) / degrees)
    beyond = _quantile(1 - alpha / 2, degrees) * found  # of the mean by its standard error, as `inside`
    inside = np.full(SPREADS, -np.inf)
    if margin is not None:
        inside = margin / error - _quantile(1 - alpha, degrees) * found
        beyond = np.maximum(beyond, inside)
    center = true / error
    equal = np.maximum(0.0, norm.cdf(inside - center) - norm.cdf(-inside - center))
    return {
        "seen": float(norm.sf(beyond - center).mean()),
        "opposite": float(norm.cdf(-beyond - center).mean()),
        "equal": float(equal.mean()),
    }


def seeds_for(
    verdicts: tuple[Verdict, ...],
    true: float,
    spread: float,
    margin: float | None = None,
    alpha: float = ALPHA,
    least: int = 2,
) -> int | None:
    """Return the smallest number of seeds, `least` or more, with which one of the verdicts is reached in 80 %
    of cases; None if `MOST_SEEDS` do not. See `chances`.
    """
    if spread == 0:
        return None

    def chance(seeds: int) -> float:
        of_verdicts = chances(true, spread, seeds, margin, alpha)
        return sum(of_verdicts[verdict] for verdict in verdicts)

    needed = least + bisect.bisect_left(range(least, MOST_SEEDS + 1), POWER, key=chance)
    return needed if needed <= MOST_SEEDS else None


def smallest_difference(spread: float, seeds: int, alpha: float = ALPHA) -> float:
    """Return the true difference that so many seeds, two or more, show in 80 % of cases."""
    from scipy.optimize import brentq

    def excess(true: float) -> float:
        return chances(true, 1.0, seeds, alpha=alpha)["seen"] - POWER

    return spread * float(brentq(excess, 0.0, 1 / alpha**2))


def largest_spread(spread: float, seeds: int) -> float:
    """Return the upper end of the true spread's one-sided 80 % interval, by the spread of so many seeds."""
    from scipy.stats import chi2

    return spread * math.sqrt((seeds - 1) / float(chi2.ppf(1 - POWER, seeds - 1)))


def levels_of(looks: Sequence[int], alpha: float = ALPHA) -> dict[int, float]:
    """Return the alpha of each look at the seeds so far, which together err in at most alpha of cases.

    looks: the numbers of seeds at which the claims are judged, ascending, planned before the first. By the
    function of Lan and DeMets 1983 that spends alpha like O'Brien and Fleming: 2 - 2 Phi(z(1 - alpha/2) /
    sqrt(share)) is spent until a share of the seeds. A look has what is spent since the one before. Nothing
    is gained from its correlation with this one, so the sum bounds the error of t tests of few seeds as well.
    """
    from scipy.stats import norm

    shares = np.array(looks) / looks[-1]
    spent = 2 * norm.sf(norm.isf(alpha / 2) / np.sqrt(shares))
    return dict(zip(looks, np.diff(spent, prepend=0.0).tolist(), strict=True))
