"""Bytes of a rank's model states, by hand: 1000 dense and 800 expert parameters."""

import pytest

from megamoe.parallel.deepspeed_config import Precision
from megamoe.parallel.memory import StateBytes, state_bytes


@pytest.mark.parametrize(
    ("stage", "precision", "data", "expert", "expected"),
    [
        # One rank holds all 1800. fp32: 4 weight, 4 gradient, 2 x 4 moments.
        (0, "fp32", 1, 1, (7200, 7200, 14400)),
        # bf16: 2 weight, 4 gradient (accumulated in fp32), 4 master, 2 x 4 moments.
        (0, "bf16", 1, 1, (3600, 7200, 21600)),
        # Expert parallelism of 2 on 4 ranks: 1000 + 800 / 2 on each.
        (0, "fp32", 4, 2, (5600, 5600, 11200)),
        # ZeRO 1 cuts the optimiser: 12 bytes of 1000 over 4 ranks, of 400 over the 2 with the same experts.
        (1, "fp32", 4, 2, (5600, 5600, 3000 + 2400)),
        (1, "bf16", 4, 2, (2800, 5600, 3000 + 2400)),
        # ZeRO 2 cuts the gradients as well.
        (2, "bf16", 4, 2, (2800, 1000 + 800, 3000 + 2400)),
        # No copy of an expert on another rank: its state cannot be cut.
        (2, "fp32", 4, 4, (4800, 1000 + 800, 3000 + 2400)),
        (2, "bf16", 4, 1, (3600, 1800, 5400)),
    ],
)
def test_state_bytes(
    stage: int, precision: Precision, data: int, expert: int, expected: tuple[float, float, float]
) -> None:
    found = state_bytes(1000, 800, stage, precision, data, expert)
    assert found == StateBytes(*expected)
    assert found.total == sum(expected)


def test_frozen_experts_are_weights_alone() -> None:
    found = state_bytes(1000, 800, 1, "bf16", 4, 2, frozen_experts=True)
    assert found == StateBytes(2000 + 800, 4000, 3000)


def test_a_dense_model() -> None:
    assert state_bytes(1000, 0, 0, "fp32", 2, 1) == StateBytes(4000, 4000, 8000)
