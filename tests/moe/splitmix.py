"""The draws keyed by token, on Python's integers."""

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """SplitMix64's finaliser."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def unit(draw_key: int, token: int, column: int) -> float:
    """Return a number in [0, 1) with 24 bits."""
    state = mix((token * GOLDEN + draw_key) & MASK)
    return (mix((state + (column + 1) * GOLDEN) & MASK) >> 40) / 2**24
