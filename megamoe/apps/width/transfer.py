"""The transfer of a learning rate: the best one of each width, found by a sweep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megamoe.apps.width.runs import WidthRun, trainer_of
from megamoe.metrics import names

Losses = dict[float, float]  # by learning rate


@dataclass(frozen=True)
class Best:
    """The best rate of a width.

    lr: the minimum of the parabola through the best rate and its neighbours. loss: at the best one of the
    sweep. at_edge: that is the first or the last one, so that the true one may lie outside.
    """

    lr: float
    loss: float
    at_edge: bool


def final_loss(run: WidthRun) -> float:
    """Train a run to its end; return its validation loss in nats, infinite if it diverged."""
    with trainer_of(run, (f"train.max_skipped_in_a_row={run.steps + 1}",)) as trainer:
        for _ in range(run.steps):
            trainer.step()
        loss = trainer.evaluate()[names.VAL_LM_LOSS]
    return loss if math.isfinite(loss) else math.inf


def mean_losses(results: Mapping[WidthRun, float], kind: str) -> dict[int, Losses]:
    """Return the losses of a kind by width and rate: means over the seeds."""
    found: dict[int, dict[float, list[float]]] = {}
    for run, loss in sorted(results.items(), key=lambda item: (item[0].width, item[0].lr or 0.0)):
        if run.kind == kind and run.lr is not None:
            found.setdefault(run.width, {}).setdefault(run.lr, []).append(loss)
    return {
        width: {lr: sum(losses) / len(losses) for lr, losses in of_width.items()}
        for width, of_width in found.items()
    }


def best_rate(losses: Losses) -> Best:
    """Return the best rate of a sweep; the parabola is over log(lr), whose steps may differ."""
    rates = sorted(losses)
    place = min(range(len(rates)), key=lambda number: losses[rates[number]])
    lr, loss = rates[place], losses[rates[place]]
    if place in (0, len(rates) - 1):
        return Best(lr, loss, at_edge=True)
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(at), losses[at]) for at in rates[place - 1 : place + 2])
    if not (math.isfinite(y0) and math.isfinite(y2)):
        return Best(lr, loss, at_edge=False)
    below, above = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (above - below) / (x2 - x0)
    if bend <= 0:  # both neighbours are as good
        return Best(lr, loss, at_edge=False)
    vertex = (x0 + x1) / 2 - below / (2 * bend)
    return Best(math.exp(vertex), loss, at_edge=False)


def geometric_rates(lowest: float, highest: float, count: int) -> list[float]:
    """Return so many rates from the lowest to the highest, each the same number of times the one before."""
    step = (highest / lowest) ** (1 / (count - 1))
    return [lowest * step**number for number in range(count)]


def conclusion(kind: str, best: Mapping[int, Best], factor: float) -> str:
    """Return one line that says what the best rate of the narrowest model is worth for the widest."""
    widths: Sequence[int] = sorted(best)
    narrow, wide = best[widths[0]], best[widths[-1]]
    ratio = wide.lr / narrow.lr
    line = f"{kind}: the best rate is {narrow.lr:.2g} at width {widths[0]} and {wide.lr:.2g} at {widths[-1]}"
    edges = [str(width) for width in widths if best[width].at_edge]
    if edges:
        return f"{line}, but that of width {', '.join(edges)} is the end of the sweep; widen --rates"
    says = "transfers" if 1 / factor <= ratio <= factor else "does not transfer"
    return f"{line}, {ratio:.2f} times as large: it {says} within a factor of {factor:g}"
