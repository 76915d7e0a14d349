"""Claims as statements: what is read, what is refused, and the interval by hand."""

import math

import pytest

from megamoe.apps.lab.claims import decide, interval, parse_claim

LOSS = {"loss": {"a": {1: 1.0, 2: 1.1, 3: 0.9}, "b": {1: 2.0, 2: 2.1, 3: 2.2}, "c": {1: 0.5, 2: 1.6, 3: 0.9}}}
SEEDS = [1, 2, 3]
NO_CLAIMS = [
    "loss(a)", "loss(a) == loss(b)", "loss(a) < loss(b) or loss(a) > 1", "1 < 2", "loss(a, b) < 1",
    "__import__('os').system('true') < 1", "loss(a) < True ** loss(b)", "loss(a) < (lambda: 1)()",
    "loss(a) <", "loss(a) < 1 " + "+ 1 " * 400, "loss(a) < True", "loss(a) < 1" + "0" * 400,
]  # fmt: skip


def verdict(text: str) -> str:
    return decide(parse_claim(text, "claims[0].test"), LOSS, SEEDS)[0]


def test_the_interval_by_hand() -> None:
    """Differences 1, 1 and 1.3: mean 1.1, standard deviation 0.17321, t of 2 degrees of freedom 4.30265."""
    mean, low, high = interval([1.0, 1.0, 1.3])
    half = 4.302652729911275 * math.sqrt(0.03) / math.sqrt(3)
    assert mean == pytest.approx(1.1)
    assert (low, high) == (pytest.approx(1.1 - half), pytest.approx(1.1 + half))
    assert interval([2.0]) == (2.0, None, None) and interval([]) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss(a) < loss(b)", "seen"),
        ("loss(b) > loss(a)", "seen"),
        ("loss(b) < loss(a)", "not seen"),
        ("loss(a) < loss(c)", "within noise"),
        ("loss(a) < 1.5 * loss(b) and loss(a) < 5", "seen"),
        ("loss(a) < loss(b) < 3", "seen"),
        ("loss(b) < loss(a) < loss(c)", "not seen"),
        ("loss(b) - loss(a) > -1", "seen"),
    ],
)
def test_verdicts(text: str, expected: str) -> None:
    assert verdict(text) == expected


def test_differences_are_paired_by_seed() -> None:
    """Rows whose spread is far larger than their difference, which is the same for each seed."""
    values = {"loss": {"a": {1: 1.0, 2: 5.0, 3: 9.0}, "b": {1: 1.1, 2: 5.1, 3: 9.11}}}
    found, (finding,) = decide(parse_claim("loss(a) < loss(b)", "test"), values, SEEDS)
    assert found == "seen" and finding.differences == pytest.approx({1: 0.1, 2: 0.1, 3: 0.11})


def test_one_seed_decides_nothing() -> None:
    values = {"loss": {"a": {1: 1.0, 2: 1.0}, "b": {1: 2.0, 3: 2.0}, "c": {}}}
    found, (finding,) = decide(parse_claim("loss(a) < loss(b)", "test"), values, [1])
    assert found == "within noise" and finding.differences == {1: 1.0} and finding.low is None
    found, (finding,) = decide(parse_claim("loss(a) < loss(c)", "test"), values, [1])
    assert found == "not measured" and finding.differences == {} and finding.mean is None
    assert decide(parse_claim("loss(b) < loss(a) < loss(c)", "test"), values, [1])[0] == "not measured"


@pytest.mark.parametrize("lost", [{}, {3: math.nan}, {3: math.inf}])
def test_seeds_without_the_missing_one_decide_nothing(lost: dict[int, float]) -> None:
    """Whichever side the two others are on: the seed that diverged might be the one on the other."""
    values = {"loss": {"a": {1: 1.0, 2: 1.1, **lost}, "b": {1: 2.0, 2: 2.101, 3: 2.2}}}
    for text in ("loss(a) < loss(b)", "loss(b) < loss(a)"):
        found, (finding,) = decide(parse_claim(text, "test"), values, SEEDS)
        assert found == "within noise" and [*finding.differences] == [1, 2] and finding.low is not None
        assert decide(parse_claim(text, "test"), values, [1, 2])[0] != "within noise"


def test_values_that_are_not_finite_are_left_out() -> None:
    values = {"loss": {"a": {1: 1.0, 2: math.nan}, "b": {1: 2.0, 2: 2.0}}}
    assert decide(parse_claim("loss(a) < loss(b)", "test"), values, SEEDS)[1][0].differences == {1: 1.0}
    claim = parse_claim("loss(a) / (loss(b) - loss(b)) < loss(b)", "test")
    assert decide(claim, values, SEEDS)[1][0].differences == {}


@pytest.mark.parametrize("text", NO_CLAIMS)
def test_what_is_no_claim(text: str) -> None:
    with pytest.raises(ValueError, match=r"^claims\[3\]\.test: "):
        parse_claim(text, "claims[3].test")
