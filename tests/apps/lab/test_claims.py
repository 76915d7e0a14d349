"""Claims as statements: what is read, what is refused, and what leaves one undecided."""

import math

import pytest

from megamoe.apps.lab.claims import decide, parse_claim

LOSS = {"loss": {"a": {1: 1.0, 2: 1.1, 3: 0.9}, "b": {1: 2.0, 2: 2.1, 3: 2.2}, "c": {1: 0.5, 2: 1.6, 3: 0.9}}}
SEEDS = [1, 2, 3]
NO_CLAIMS = [
    "loss(a)", "loss(a) == loss(b)", "loss(a) < loss(b) or loss(a) > 1", "1 < 2", "loss(a, b) < 1",
    "__import__('os').system('true') < 1", "loss(a) < True ** loss(b)", "loss(a) < (lambda: 1)()",
    "loss(a) <", "loss(a) < 1 " + "+ 1 " * 400, "loss(a) < True", "loss(a) < 1" + "0" * 400,
]  # fmt: skip


def verdict(text: str) -> str:
    return decide(parse_claim(text, "claims[0].test"), LOSS, SEEDS)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss(a) < loss(b)", "seen"),
        ("loss(b) > loss(a)", "seen"),
        ("loss(b) < loss(a)", "opposite"),
        ("loss(a) < loss(c)", "undecided"),
        ("loss(a) < 1.5 * loss(b) and loss(a) < 5", "seen"),
        ("loss(a) < loss(b) < 3", "seen"),
        ("loss(b) < loss(a) < loss(c)", "opposite"),
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
    assert found == "undecided" and finding.differences == {1: 1.0} and finding.low is None
    assert finding.reason == "one seed"
    found, (finding,) = decide(parse_claim("loss(a) < loss(c)", "test"), values, [1])
    assert found == "not measured" and finding.differences == {} and finding.mean is None
    assert decide(parse_claim("loss(b) < loss(a) < loss(c)", "test"), values, [1])[0] == "not measured"


@pytest.mark.parametrize("lost", [{}, {3: math.nan}, {3: math.inf}])
def test_seeds_without_the_missing_one_decide_nothing(lost: dict[int, float]) -> None:
    """Whichever side the two others are on: the seed that diverged might be the one on the other."""
    values = {"loss": {"a": {1: 1.0, 2: 1.1, **lost}, "b": {1: 2.0, 2: 2.101, 3: 2.2}}}
    for text in ("loss(a) < loss(b)", "loss(b) < loss(a)"):
        found, (finding,) = decide(parse_claim(text, "test"), values, SEEDS)
        assert found == "undecided" and [*finding.differences] == [1, 2] and finding.low is not None
        assert finding.reason == "1 of 3 seeds missing"
        assert decide(parse_claim(text, "test"), values, [1, 2])[0] != "undecided"


def test_values_that_are_not_finite_are_left_out() -> None:
    values = {"loss": {"a": {1: 1.0, 2: math.nan}, "b": {1: 2.0, 2: 2.0}}}
    assert decide(parse_claim("loss(a) < loss(b)", "test"), values, SEEDS)[1][0].differences == {1: 1.0}
    claim = parse_claim("loss(a) / (loss(b) - loss(b)) < loss(b)", "test")
    assert decide(claim, values, SEEDS)[1][0].differences == {}


def test_a_margin_makes_what_lies_within_it_equal() -> None:
    """In the unit of the measure, or in percent of the right side's mean, which is 2.1 of b."""
    near = {"loss": {**LOSS["loss"], "d": {1: 2.001, 2: 2.101, 3: 2.203}}}
    claim = parse_claim("loss(b) < loss(d)", "test")
    assert decide(claim, near, SEEDS)[0] == "undecided"
    for margin, expected in (
        (0.01, "equal"),
        (0.002, "undecided"),
        ("0.5 %", "equal"),
        ("0.1 %", "undecided"),
    ):
        verdict, (finding,) = decide(claim, near, SEEDS, margin)
        assert verdict == expected, margin
    assert finding.margin == pytest.approx(0.0021016667) and finding.reason.endswith(" more")
    both = parse_claim("loss(a) < loss(b) and loss(b) < loss(d)", "test")
    assert decide(both, near, SEEDS, 0.01)[0] == "equal"


def test_rows_beyond_a_bound_are_not_compared_by_loss_alone() -> None:
    values = LOSS | {
        "dropped": {"a": {1: 0.2, 2: 0.6}, "b": {1: 0.0}, "c": {1: 0.1}},
        "flops": {"a": {1: 6.0}, "b": {1: 6.5}, "c": {1: 8.0}},
    }
    for text, bounds, reason in (
        ("loss(a) < loss(b)", {"dropped": 0.1}, "dropped of a is 0.4, bound 0.1"),
        ("loss(a) < loss(b)", {"flops": "10 %"}, ""),
        ("loss(a) < 5", {"flops": "1 %"}, ""),
        ("loss(a) < loss(b) < 3", {"flops": "5 %"}, "flops of a is 6, bound 6.17"),
        ("loss(a) < loss(b) and flops(a) < 10", {"flops": "5 %"}, ""),  # a claim about what is bounded
    ):
        (finding, *_) = decide(parse_claim(text, "test"), values, SEEDS, bounds=bounds)[1]
        assert (finding.reason, finding.verdict) == (reason, "undecided" if reason else "seen"), text


@pytest.mark.parametrize("text", NO_CLAIMS)
def test_what_is_no_claim(text: str) -> None:
    with pytest.raises(ValueError, match=r"^claims\[3\]\.test: "):
        parse_claim(text, "claims[3].test")
