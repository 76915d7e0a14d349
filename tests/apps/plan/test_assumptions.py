"""The table of assumptions: cases in order, sources, rows by size, and files of measured rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.apps.plan.assumptions import ASSUMED, OPTIMISTIC, PESSIMISTIC, SECONDS, read
from megamoe.apps.plan.counter import OperatorKey, OperatorTotal
from megamoe.apps.plan.roofline import operator_seconds
from megamoe.metrics.gpus import GPUS, gpu_of_device
from tests.support.refusals import Case, cases, told

# A step of moe_1b on one rank, tuned, all experts on each rank, one micro batch: the host's seconds without
# CUDA's driver, kernels and collectives, and the calls of PyTorch's operators and of ours. The least of 25
# steps of `python benchmarks/host_time.py`; 2026-11-24, torch 2.13, triton 3.7.1, Python 3.11, one thread of
# an AMD EPYC (Zen 4) with other processes beside it.
MEASURED_S, CALLS, OWN_CALLS = 51.2e-3, 602, 268


def test_each_row_has_a_source_and_its_cases_are_in_order() -> None:
    for low, likely, high in zip(PESSIMISTIC.rows, ASSUMED.rows, OPTIMISTIC.rows, strict=True):
        assert low.key == likely.key == high.key
        assert likely.source
        in_order = low.value < likely.value < high.value
        assert (low.value > likely.value > high.value) if likely.kind in SECONDS else in_order, likely.name
    assert len({row.key for row in ASSUMED.rows}) == len(ASSUMED.rows)


def test_the_host_takes_what_was_measured() -> None:
    """The host of an H100 took 62 ms for calls that take 42.6 ms on this project's machine."""
    seconds = CALLS * OPTIMISTIC.aten_call_s + OWN_CALLS * OPTIMISTIC.own_call_s
    assert seconds == pytest.approx(MEASURED_S, rel=0.01)
    for kind in ("aten_call_s", "own_call_s"):
        assert ASSUMED.of(kind) == pytest.approx(OPTIMISTIC.of(kind) * 62 / 42.6, rel=0.01)


def test_an_operator_takes_the_row_of_its_size_and_phase() -> None:
    """An H100 has 370 TFLOP/s at head 64, so 3.7 TFLOP take 10 ms."""
    total, h100 = OperatorTotal(1, 1, 0, 3_700_000_000_000), GPUS["h100"]
    attention = "aten::_scaled_dot_product_flash_attention"

    def seconds(name: str, shape: tuple[tuple[int, ...], ...], phase: str = "forward") -> float:
        return operator_seconds(OperatorKey("any", phase, name, "bfloat16", shape), total, h100, ASSUMED)

    assert seconds(attention, ((8, 16, 2048, 64),)) == pytest.approx(0.01, rel=0.01)
    assert seconds(attention, ((8, 16, 2048, 64),), "backward") > seconds(attention, ((8, 16, 2048, 64),))
    assert seconds(attention, ((8, 16, 2048, 128),)) < seconds(attention, ((8, 16, 2048, 64),))
    large, small = ((8192, 4096), (4096, 4096)), ((1024, 16384), (16384, 1024))
    assert seconds("aten::mm", large) < seconds("aten::mm", small)
    # A stack of experts may have fewer experts than its weights have columns.
    few = ((32768, 1024), (4, 1024, 1376))
    assert seconds("aten::_grouped_mm", few) == pytest.approx(
        3.7e12 / (h100.bf16 * ASSUMED.of("grouped", 1024))
    )


@pytest.mark.parametrize("case", cases("plan", "rates: "))
def test_mistakes_in_a_file(tmp_path: Path, case: Case, expect_message: Callable[..., None]) -> None:
    path = tmp_path / "assumptions.json"
    path.write_text(json.dumps({"rates": case["rates"]}))
    expect_message(case, told(lambda: read(str(path))))


def test_a_device_is_found_by_its_name() -> None:
    assert gpu_of_device("NVIDIA H200") is GPUS["h200"]
    assert gpu_of_device("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_of_device("NVIDIA H100 PCIe") is None
    assert gpu_of_device("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert gpu_of_device("GRID H100-7-80C") is None
