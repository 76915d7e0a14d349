"""What is printed of the steps, and the same as plain data."""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from common.bars import holds, interval, verdict
from common.rounds import Ratio
from steps.measure import FLAT, Measured
from steps.parts import BACKWARD, FORWARD
from steps.shapes import DENSE_BARS, OPTIMIZER_BAR, TRANSFORMERS_BAR

COLUMNS = {
    "total": "step",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimiser",
    "update": "update",
}


@dataclasses.dataclass(frozen=True)
class Judged:
    """A ratio, and its bar where one is asked of it here."""

    what: str
    ratio: Ratio
    bar: float | None
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the bar holds, if there is one."""
        return self.bar is None or holds(self.ratio, self.bar, self.at_least)

    def line(self) -> str:
        """Return the line that is printed."""
        if self.bar is None:
            return f"{self.what}: {interval(self.ratio)}"
        return verdict(self.what, self.ratio, self.bar, self.at_least)

    def as_data(self) -> dict[str, Any]:
        """Return the same as data; without a bar, `bar` is null."""
        return {"what": self.what, **dataclasses.asdict(self.ratio), "bar": self.bar, "pass": self.holds}


def judge(found: Measured, shape: str | None) -> list[Judged]:
    """Return all ratios; shape: of SHAPES, by whose bars they are judged, None: by none."""
    dense_bar = DENSE_BARS[shape].get(found.precision) if shape else None

    def of(what: str, over: str, under: str) -> Ratio:
        return Ratio.of(found.seconds(over, what), found.seconds(under, what))

    judged = [
        Judged("step, moe / dense", of("total", "moe", "dense"), None),
        Judged("forward and backward, moe / dense", of("both", "moe", "dense"), dense_bar),
    ]
    if "transformers" in found.steps:
        bar = TRANSFORMERS_BAR if shape else None
        tokens = of("total", "transformers", "moe")
        judged += [
            Judged("tokens/s, moe / transformers", tokens, bar, at_least=True),
            Judged("forward and backward, transformers / moe", of("both", "transformers", "moe"), None),
        ]
    bar = OPTIMIZER_BAR if shape else None
    return [
        *judged,
        Judged("update, moe / flat AdamW", of("update", "moe", FLAT), bar),
        Judged("optimiser, moe / flat AdamW", of("optimizer", "moe", FLAT), bar),
    ]


def show(found: Measured, judged: list[Judged]) -> None:
    """Print the tables and the lines of the ratios."""
    print(
        f"{'ms, medians':14}{'parameters':>12}" + "".join(f"{head:>11}" for head in COLUMNS.values()), end=""
    )
    print(f"{'tokens/s':>11}{'update, ns a parameter':>25}")
    for name in [*found.steps, *found.left_out]:
        print(_row(name, found))
    for name in found.parts:
        print(f"\nwhere a step of {name} goes, of {len(found.parts[name])} rounds with hooks")
        for label, seconds, share in parts_of(name, found):
            print(f"{label:26}{1000 * seconds:9.2f} ms{100 * share:7.1f} %")
    print()
    for each in judged:
        print(each.line())


def _row(name: str, found: Measured) -> str:
    if name in found.left_out:
        return f"{name:14} left out: {found.left_out[name]}"
    medians = {what: statistics.median(found.seconds(name, what)) for what in COLUMNS}
    per_parameter = 1e9 * medians["update"] / found.updated[name]
    text = f"{name:14}{found.parameters[name]:12,}"
    if name == FLAT:
        text += f"{'':33}" + "".join(f"{1000 * medians[what]:11.2f}" for what in ("optimizer", "update"))
        return text + f"{'':11}{per_parameter:25.3f}"
    text += "".join(f"{1000 * seconds:11.2f}" for seconds in medians.values())
    return text + f"{found.tokens / medians['total']:11,.0f}{per_parameter:25.3f}"


def parts_of(name: str, found: Measured) -> Iterator[tuple[str, float, float]]:
    """(part, median seconds, median share of the step) in the order of a step; two spaces a level."""
    rounds = found.parts[name]
    for what in ("data", "forward", "backward", "optimizer", "rest"):
        times = [(getattr(step, what), step.total) for step, _ in rounds]
        yield ("optimiser" if what == "optimizer" else what, *_medians(times))
        for part in {"forward": FORWARD, "backward": BACKWARD}.get(what, ()):
            if (what, part) in rounds[0][1]:
                inside = [(parts[what, part], step.total) for step, parts in rounds]
                indent = "    " if ": " in part else "  "
                yield (indent + part.split(": ")[-1], *_medians(inside))


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(s for s, _ in times), statistics.median(s / total for s, total in times)


def as_data(found: Measured, judged: list[Judged]) -> dict[str, Any]:
    """Return all that was measured, seconds of every round included."""
    candidates: dict[str, Any] = {name: {"not measured": why} for name, why in found.left_out.items()}
    for name in found.steps:
        candidates[name] = {
            "parameters": found.parameters[name],
            "updated": found.updated[name],
            "seconds": {what: found.seconds(name, what) for what in ("data", *COLUMNS)},
        }
    parts = {
        name: [{"part": part, "seconds": s, "share": share} for part, s, share in parts_of(name, found)]
        for name in found.parts
    }
    return {
        "precision": found.precision,
        "tokens": found.tokens,
        "candidates": candidates,
        "parts": parts,
        "ratios": [each.as_data() for each in judged],
    }
