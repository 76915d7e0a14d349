"""Bytes of a rank's model states, by hand: 1000 dense and 800 expert parameters."""

import pytest

from megamoe.config.schema import Precision
from megamoe.parallel.zero.costs import Share, StateBytes, state_bytes
from megamoe.parallel.zero.deepspeed_config import Offload


def shares(data: int, expert: int, frozen: bool = False) -> list[Share]:
    here = 800 / expert
    return [Share(1000, 1000, data), Share(here, 0 if frozen else here, data // expert)]


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
        (1, "fp16", 4, 2, (2800, 5600, 3000 + 2400)),
        (1, "bf16", 4, 2, (2800, 5600, 3000 + 2400)),
        # ZeRO 2 cuts the gradients as well.
        (2, "bf16", 4, 2, (2800, 1000 + 800, 3000 + 2400)),
        # No copy of an expert on another rank: its state cannot be cut.
        (2, "fp32", 4, 4, (4800, 1000 + 800, 3000 + 2400)),
        (2, "bf16", 4, 1, (3600, 1800, 5400)),
        # ZeRO 3 cuts the weights too.
        (3, "fp32", 4, 2, (1000 + 800, 1000 + 800, 3000 + 2400)),
        (3, "bf16", 4, 4, (500 + 400, 1000 + 800, 3000 + 2400)),
    ],
)
def test_state_bytes(
    stage: int, precision: Precision, data: int, expert: int, expected: tuple[float, float, float]
) -> None:
    found = state_bytes(shares(data, expert), stage, precision)
    assert found == StateBytes(*expected)
    assert found.total == sum(expected)


def test_frozen_experts_are_weights_alone() -> None:
    found = state_bytes(shares(4, 2, frozen=True), 2, "bf16")
    assert found == StateBytes(2000 + 800, 1000, 3000)


@pytest.mark.parametrize(
    ("stage", "offload", "expected"),
    [
        # On the CPU 12 of master and moments, 4 of the gradient that it steps with, 2 of the new weights,
        # over 1000 / 4 + 400 / 2 = 450 parameters; ZeRO 1 accumulates 4 x 1400 on the device.
        (1, Offload("cpu"), StateBytes(2800, 5600, 0, 450 * 18)),
        # From ZeRO 2 on the gradients accumulate there: 4 more.
        (2, Offload("cpu"), StateBytes(2800, 0, 0, 450 * 22)),
        (3, Offload("cpu"), StateBytes(900, 0, 0, 450 * 20)),
        (3, Offload("cpu", "cpu"), StateBytes(0, 0, 0, 450 * 22)),
        (3, Offload("nvme", "nvme"), StateBytes(0, 0, 0, 450 * 4, 450 * 18)),
        (3, Offload("nvme", "cpu"), StateBytes(0, 0, 0, 450 * 6, 450 * 16)),
    ],
)
def test_what_is_offloaded_is_counted_apart(stage: int, offload: Offload, expected: StateBytes) -> None:
    assert state_bytes(shares(4, 2), stage, "bf16", offload) == expected


def test_what_the_optimiser_keeps_of_a_number() -> None:
    """bf16 at ZeRO 1: 4 master, two moments; a mean has 4 more, and Muon one moment of 600."""
    weights = (2000, 4000)
    share = Share(1000, 1000, 1, moment=2)
    assert state_bytes([share], 1, "bf16") == StateBytes(*weights, 8000)
    share = Share(1000, 1000, 1, of_muon=600, has_mean=True)
    assert state_bytes([share], 1, "bf16") == StateBytes(*weights, 16000 - 2400)


def test_a_dense_model() -> None:
    assert state_bytes([Share(1000, 1000, 2)], 0, "fp32") == StateBytes(4000, 4000, 8000)
