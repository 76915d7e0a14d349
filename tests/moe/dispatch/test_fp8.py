"""Rows in 8 bits: the error, the exponents by hand, and that a second time loses nothing."""

import math

import pytest
import torch

from megamoe.moe.dispatch.fp8 import BLOCK, fp8_row_bytes, from_fp8, to_fp8

WIDTHS = (1, 16, 127, 128, 129, 300)


def rows_of(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows whose blocks differ in size by many powers of two."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(50, width, generator=generator)
    return (rows * torch.exp2(torch.randint(-20, 20, (50, 1), generator=generator))).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_bounded(width: int, dtype: torch.dtype) -> None:
    rows = rows_of(width, dtype)
    encoded = to_fp8(rows)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (50, fp8_row_bytes(width)) == (50, width + math.ceil(width / BLOCK))
    decoded = from_fp8(encoded, dtype)
    assert decoded.dtype == dtype and decoded.shape == rows.shape
    for first in range(0, width, BLOCK):
        block, error = rows[:, first : first + BLOCK].double(), decoded[:, first : first + BLOCK].double()
        error = (error - block).abs()
        largest = block.abs().amax(dim=1, keepdim=True)
        assert (error <= torch.maximum(block.abs() / 16, largest / 1024)).all()
    assert (decoded - rows).abs().max() > 0 or width == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_a_second_time_loses_nothing(width: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        once = from_fp8(to_fp8(rows_of(width, dtype)), dtype)
        assert torch.equal(from_fp8(to_fp8(once), dtype), once)


def test_by_hand() -> None:
    """448 fits with the exponent 0, which is 127 in the byte; 449 needs 2."""
    rows = torch.zeros(3, 4)
    rows[0, 0], rows[1, 1], rows[1, 2] = 448.0, 449.0, 3.0
    encoded = to_fp8(rows)
    assert encoded[:, 4].tolist()[1:] == [128, 127]
    assert from_fp8(encoded, torch.float32)[0].tolist() == [448.0, 0, 0, 0]
    assert from_fp8(encoded, torch.float32)[1].tolist() == [0, 448.0, 3.0, 0]


def test_what_is_not_finite_stays_so() -> None:
    rows = torch.ones(3, 200)
    rows[0, 3], rows[1, 150], rows[2, 7] = float("nan"), float("inf"), -float("inf")
    decoded = from_fp8(to_fp8(rows), torch.float32)
    assert not decoded[0, :128].isfinite().all() and not decoded[1, 128:].isfinite().all()
    assert not decoded[2, :128].isfinite().all()
    assert torch.equal(decoded[:2][[0, 1], [199, 0]], torch.ones(2))  # the other blocks


def test_no_rows() -> None:
    assert from_fp8(to_fp8(torch.zeros(0, 130)), torch.bfloat16).shape == (0, 130)
