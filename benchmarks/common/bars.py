"""Whether a measured ratio clears what is asked of it, and the line that says so."""

from common.rounds import Ratio


def holds(ratio: Ratio, bar: float, at_least: bool = False) -> bool:
    """Return whether the interval reaches under the bar; over it, where the bar asks for at least so much."""
    return ratio.high > bar if at_least else ratio.low < bar


def verdict(what: str, ratio: Ratio, bar: float, at_least: bool = False) -> str:
    """Return the line of a bar."""
    found = "pass" if holds(ratio, bar, at_least) else "under" if at_least else "over"
    return f"{what}: {interval(ratio)}, bar {'at least ' if at_least else ''}{bar}: {found}"


def interval(ratio: Ratio) -> str:
    """Return the median and its interval, if there is one, as text."""
    if ratio.low == ratio.high:
        return f"{ratio.median:.3f}"
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
