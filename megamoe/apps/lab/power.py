"""What a study can show: the differences that its seeds see, by the spread of a pilot's results."""

from statistics import stdev
from typing import Any

from megamoe.apps.lab.claims import Amount, amount, decide
from megamoe.apps.lab.page import Table, number
from megamoe.apps.lab.plan import Plan
from megamoe.apps.lab.results import stored_values
from megamoe.apps.lab.verdicts import MOST_SEEDS, Verdict, largest_spread, seeds_for, smallest_difference

TOLD = (
    "Each in 80 % of cases: the difference that the seeds of this size see; how many seeds see the declared "
    "one; how many show that equal rows are equal within the margin. From the pilot's spread to the upper "
    "end of its one-sided 80 % interval."
)


def power_table(plan: Plan, pilot: dict[str, Any]) -> Table:
    """Return a row for each comparison of the plan's claims, by the results of a pilot.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if these are no results.
    """
    values, seeds, alpha = stored_values(pilot), max(2, len(plan.size.seeds)), plan.size.alpha
    table = [["comparison", "spread", f"{seeds} seeds see", "seeds for the difference", "and for the margin"]]
    for text, claim in plan.claims:
        for finding in decide(claim, values, pilot["seeds"])[1]:
            differences, right = [*finding.differences.values()], finding.right
            if right is None or len(differences) < 2:
                table.append([f"`{finding.text}`", "unknown: fewer than two seeds", "", "", ""])
                continue
            spread = stdev(differences)
            ends = [spread, largest_spread(spread, len(differences))]
            columns = [[number(each) for each in ends]]
            columns.append([number(smallest_difference(each, seeds, alpha)) for each in ends])
            declared: dict[Verdict, Amount | None] = {"seen": text.difference, "equal": text.margin}
            for verdict, size in declared.items():
                columns.append([_seeds(size, right, verdict, each, alpha) for each in ends])
            table.append([f"`{finding.text}`", *(" to ".join(dict.fromkeys(column)) for column in columns)])
    return table


def _seeds(declared: Amount | None, right: float, verdict: Verdict, spread: float, alpha: float) -> str:
    """Return how many seeds see a difference of this size, or equal rows within it; empty if none."""
    if declared is None:
        return ""
    size = amount(declared, right)
    true, margin = (size, None) if verdict == "seen" else (0.0, size)
    needed = seeds_for((verdict,), true, spread, margin, alpha)
    return f"over {MOST_SEEDS:,}" if needed is None else f"{needed}"
