"""The two clocks of the plan by hand; check_simulation.py has what an H100 took."""

import pytest

from megamoe.apps.plan.assumptions import Assumptions, Rate, Seconds
from megamoe.apps.plan.counter import CollectiveKey, Counts, OperatorKey
from megamoe.apps.plan.roofline import idle_seconds

SECONDS: dict[Seconds, float] = {
    "aten_call_s": 2.0,
    "own_call_s": 3.0,
    "collective_call_s": 1.0,
    "sync_s": 1.0,
}
BY_HAND = Assumptions("likely", tuple(Rate(kind, "", 0, value, "") for kind, value in SECONDS.items()))
SHORT, LONG = (OperatorKey("any", "forward", name, "", ()) for name in ("aten::add", "megamoe::sum"))
BESIDE = CollectiveKey("gradients", "backward", "allreduce", (0, 1), is_async=True)
WAIT = None


@pytest.mark.parametrize(
    ("order", "idle"),
    [
        # The host takes 6 s, the device 11: it always has something to do.
        ([SHORT, LONG, BESIDE], 0.0),
        # The host takes 6 s, the device 3.
        ([SHORT, SHORT, SHORT], 3.0),
        # The device begins at 2 and ends at 3, and at 5 and 15. The host goes on at 16; the device waits
        # from 15 to 18. What it does until 29 the host calls until 21: the next step begins without a gap.
        ([SHORT, LONG, WAIT, SHORT, LONG], 3.0 + 2.0),
        # The same with a wait at the end, as if each step were timed alone: 1 + 2 s, and 2 s between.
        ([SHORT, LONG, WAIT, SHORT, LONG, WAIT], 2 * (3.0 + 2.0)),
        # What runs beside the passes takes the host's time alone.
        ([SHORT, BESIDE, BESIDE, WAIT], 4.0),
    ],
)
def test_by_hand(order: list[OperatorKey | CollectiveKey | None], idle: float) -> None:
    counts = Counts(order=order)
    for key in (SHORT, LONG):
        counts.operators[key].calls += 1
    counts.collectives[BESIDE].calls += 1
    assert idle_seconds(counts, {SHORT: 1.0, LONG: 10.0}, BY_HAND) == pytest.approx(idle)
