"""The load of the experts as a parameter, for an exchange of rows whose counts have no values."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megamoe.moe.dispatch import AllToAllDispatch, LocalDispatch, Plan
from megamoe.moe.routing import Routing
from megamoe.simulation.parts import Parts


class CountedDispatch:
    """A dispatch whose operators belong to the parts `dispatch` and `combine`, under a given load.

    load: rows that this rank's experts get, over the mean of all ranks.
    """

    def __init__(self, inner: AllToAllDispatch | LocalDispatch, load: float, parts: Parts) -> None:
        self._inner, self._load, self._parts = inner, load, parts
        self._pairs = 0
        if isinstance(inner, AllToAllDispatch):
            inner.read_counts = self._counts

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Plan]:
        """See `AllToAllDispatch`."""
        self._pairs = len(routing.pairs.token_N)
        with self._parts.inside("dispatch"):
            return self._inner.dispatch(hidden_TH, routing)

    def send_along(self, values_N: Tensor, plan: Plan) -> Tensor:
        """See `AllToAllDispatch`."""
        return self._inner.send_along(values_N, plan)

    def combine(self, rows_NH: Tensor, plan: Plan) -> Tensor:
        """See `AllToAllDispatch`."""
        with self._parts.inside("combine"):
            return self._inner.combine(rows_NH, plan)

    def _counts(self, counts: Sequence[Tensor]) -> list[list[int]]:
        """This rank is the fullest, and all ranks send to it alike; the others share the rest evenly."""
        inner: Any = self._inner
        for vector in counts[:1]:
            vector.cpu()  # the copy for which a real run waits
        sent, received, gathered = (len(vector) for vector in counts)
        to_full = min(self._pairs, round(self._load * self._pairs / sent))
        others = evenly(self._pairs - to_full, sent - 1)
        sent_R = [*others[: inner.rank], to_full, *others[inner.rank :]] if sent > 1 else [self._pairs]
        received_R = [to_full] * received
        return [sent_R, received_R, [sum(received_R)] * gathered]


def evenly(total: int, parts: int) -> list[int]:
    """The total in so many parts, the first ones larger by 1."""
    return [total // parts + (number < total % parts) for number in range(parts)]
