"""Rounds in which every candidate is measured once, and what the rounds' ratios show.

A machine whose speed drifts slows all candidates of a round alike, so candidates are compared by the ratios
within rounds, never by times of different rounds.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def in_turn(runs: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int) -> dict[str, list[T]]:
    """Return what each run gave in each round after `warm_up` others; it gets the round's number, from 0.

    Each round begins with the candidate after the one that the last round began with.
    """
    found: dict[str, list[T]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = runs[name](number)
            if number >= warm_up:
                found[name].append(value)
    return found


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 90 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, over: list[float], under: list[float]) -> "Ratio":
        """Return the interval of the quotients over / under of equal rounds."""
        ratios = sorted(a / b for a, b in zip(over, under, strict=True))
        return cls(statistics.median(ratios), *median_interval(ratios))


def median_interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 90 % confidence interval of the median by order statistics (normal approximation)."""
    count = len(ordered)
    reach = 1.645 * count**0.5 / 2
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return ordered[max(0, low)], ordered[min(count - 1, high)]
