"""What is printed, and the same as plain data."""

import dataclasses
import statistics
from typing import Any

from common.bars import interval
from layers.catalogue import CANDIDATES, YARDSTICKS
from layers.measure import Measured

DIRECTIONS = {"forward": "fwd", "both": "fwd+bwd"}


def show(title: str, found: Measured) -> None:
    """Print the table of one shape in one dtype."""
    loads = f"{min(found.loads):.2f} to {max(found.loads):.2f}"
    print(f"\n{title}: {found.shape}; {found.dtype}; largest load {loads} of the mean")
    heads = [f"{name + ' ms':>11}{name + ' / limit':>27}" for name in DIRECTIONS.values()]
    ahead = [f"{'ours / it, ' + name:>34}" for name in DIRECTIONS.values()]
    print(f"{'':20}{'router':>11}{'error':>9}" + "".join(heads + ahead))
    for name in [*found.seconds, *found.left_out]:
        print(row(name, found), flush=True)


def row(name: str, found: Measured) -> str:
    """Return a candidate's line."""
    if name in found.left_out:
        return f"{name:20} not measured: {found.left_out[name]}"
    text = f"{name:20}{CANDIDATES[name].router:>11}{found.errors[name]:9.1e}"
    for direction in DIRECTIONS:
        median = 1000 * statistics.median(getattr(found.seconds[name], direction))
        ratio = found.over_limit(name, direction)
        text += f"{median:11.2f}{interval(ratio) if ratio else '':>27}"
    if name in YARDSTICKS:
        return text
    for direction in DIRECTIONS:
        ratio = found.ours_over(name, direction)
        ahead = " ahead" if ratio and ratio.high < 1 else ""
        text += f"{interval(ratio) + f'{ahead:6}' if ratio else '':>34}"
    return text.rstrip()


def as_data(found: Measured) -> dict[str, Any]:
    """Return all that was measured, seconds of every round included."""
    candidates: dict[str, Any] = {name: {"not measured": why} for name, why in found.left_out.items()}
    for name, seconds in found.seconds.items():
        candidates[name] = {"router": CANDIDATES[name].router, "error": found.errors[name]}
        for direction in DIRECTIONS:
            times = getattr(seconds, direction)
            over, ours = found.over_limit(name, direction), found.ours_over(name, direction)
            candidates[name][direction] = {
                "seconds": times,
                "median": statistics.median(times),
                "over_limit": over and dataclasses.asdict(over),
                "ours_over": ours and dataclasses.asdict(ours),
            }
    shape = dataclasses.asdict(found.shape)
    return {"shape": shape, "dtype": found.dtype, "loads": found.loads, "candidates": candidates}
