"""Formatting durations and counts for people, and numbers that are not finite for JSON."""

import math
from typing import Any

NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def name_non_finite(value: Any) -> Any:
    """Return plain data with the names of NON_FINITE for numbers that are not finite, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: name_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [name_non_finite(item) for item in value]
    return value


def readable(text: str, longest: int = 60) -> str:
    """Return a name without characters that cannot be drawn or written; folder names may hold any bytes."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return cut.encode(errors="backslashreplace").decode()


def format_number(value: float, pattern: str) -> str:
    """Return `pattern.format(value)`, or scientific notation for very large numbers."""
    return pattern.format(value) if abs(value) < 1e15 or not math.isfinite(value) else f"{value:.3e}"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds: `45s`, `3m12s`, `2h05m`, `3d04h`."""
    if not abs(seconds) < 1e12:  # nor NaN
        return f"{seconds:.3g}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def format_count(count: float) -> str:
    """Format a count with a unit: `812`, `34.1k`, `12.3M`, `1.42B`, `3.10T`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"
