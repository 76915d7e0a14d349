"""2,000 steps on one rank and on four: the losses are the stored ones, but for rounding."""

import json

import numpy as np
import pytest

from tests.distributed.long_runs.curves import ALONE, LAYOUTS, STORED, curve
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place

RUNS = json.loads(STORED.read_text())


@pytest.mark.full
@pytest.mark.parametrize("place", [ALONE, *LAYOUTS], ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_the_losses_are_the_stored_ones(pool: Pool, name: str, place: Place) -> None:
    model, precision = name.split()
    losses, bounds = (np.array(RUNS[name][word]) for word in ("losses", "bounds"))
    beyond = np.abs(curve(pool, model, precision, place) - losses) / bounds
    assert beyond.max() <= 1, f"{beyond.max():.1f} times the bound, first at {int((beyond > 1).argmax())}"
