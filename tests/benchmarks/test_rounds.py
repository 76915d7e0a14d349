"""How the benchmarks pair what they measure."""

from functools import partial
from types import ModuleType

import pytest


@pytest.fixture(name="rounds")
def _rounds(scripts: None) -> ModuleType:
    from common import rounds

    return rounds


def test_each_round_begins_with_another_and_warm_up_is_not_kept(rounds: ModuleType) -> None:
    order: list[str] = []

    def run(name: str, number: int) -> int:
        order.append(name)
        return number

    runs = {name: partial(run, name) for name in "abc"}
    assert rounds.in_turn(runs, rounds=3, warm_up=1) == {name: [1, 2, 3] for name in "abc"}
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


def test_a_ratio_is_of_equal_rounds(rounds: ModuleType) -> None:
    slow_half = [1.0] * 10 + [100.0] * 10
    ratio = rounds.Ratio.of([2 * seconds for seconds in slow_half], slow_half)
    assert (ratio.median, ratio.low, ratio.high) == (2, 2, 2)


def test_the_interval_of_a_median_narrows_with_the_rounds(rounds: ModuleType) -> None:
    # Of 15 and of 101 values by order statistics, with 1.645 standard deviations of a fair coin's count.
    assert rounds.median_interval([float(value) for value in range(15)]) == (4, 10)
    assert rounds.median_interval([float(value) for value in range(101)]) == (42, 58)
