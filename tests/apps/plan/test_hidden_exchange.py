"""What the plan says other work hides of the experts' exchange, by hand."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.plan import roofline as module
from megamoe.apps.plan.assumptions import ASSUMED
from megamoe.apps.plan.counter import CollectiveKey, CollectiveTotal, OperatorKey, OperatorTotal
from megamoe.apps.plan.hardware import GPUS

RANKS = (0, 8)
PHASES = ("forward", "backward")


def costs_of(seconds: dict[str, float], **further: Any) -> Any:
    """Operators of so many seconds in each phase; exchanges of 10 s both ways; counts of 5 s."""
    operators = {
        OperatorKey(part, phase, "aten::mm", "bf16", ()): OperatorTotal(bytes=round(1000 * time))
        for phase in PHASES
        for part, time in seconds.items()
    }
    traffic = defaultdict(CollectiveTotal)
    for phase in PHASES:
        for part, ranks, is_async, size in (
            ("dispatch", RANKS, True, 10),
            ("combine", RANKS, False, 10),
            ("dispatch", RANKS, False, 5),
            ("dispatch", (0, 1), True, 7),  # inside the node
        ):
            traffic[CollectiveKey(part, phase, "alltoall_base", ranks, is_async)] = CollectiveTotal(1, size)
    counts = SimpleNamespace(operators=operators, collectives=traffic)
    given = {"in_flight": 1, "exchanges_again": False, "travel_ranks": RANKS, **further}
    return SimpleNamespace(counts=counts, **given)


@pytest.mark.parametrize(
    ("seconds", "further", "expected"),
    [
        # Beside shared experts, and weight gradients in the backward pass; never longer than the exchange.
        ({"shared experts": 4}, {}, {"forward": (4, 0), "backward": (4, 0)}),
        (
            {"shared experts": 8, "experts, weight gradients": 8},
            {},
            {"forward": (10, 0), "backward": (10, 0)},
        ),
        # In flight, everything else hides too: 14 of the 20 seconds, 4 of them beside its own.
        ({"shared experts": 4, "attention": 10}, {"in_flight": 2}, {"forward": (7.75, 6.25)}),
        ({"attention": 100}, {"in_flight": 2}, {"forward": (10, 10), "backward": (10, 10)}),
        # The half of a block that is computed again does not take turns.
        ({"attention": 100}, {"in_flight": 2, "exchanges_again": True}, {"backward": (5, 5)}),
    ],
)
def test_by_hand(
    seconds: dict[str, float],
    further: dict[str, Any],
    expected: dict[str, tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "operator_seconds", lambda key, total, *_: total.bytes / 1000)
    gpu = replace(GPUS["h100"], name="any")
    found = module.hidden_exchange(
        costs_of(seconds, **further), gpu, ASSUMED, lambda key, total, *_: float(total.bytes)
    )
    for phase, (dispatch, combine) in expected.items():
        assert found[phase, "dispatch"] == pytest.approx(dispatch)
        assert found.get((phase, "combine"), 0.0) == pytest.approx(combine)
