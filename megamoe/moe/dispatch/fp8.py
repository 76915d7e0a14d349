"""Rows in 8 bits for an exchange: e4m3 values with a power of two for each row and block of 128 values.

A power of two as the scale loses nothing against any other one, because a floating-point format has the same
relative step at every magnitude. With it, rows that were sent in 8 bits once can be sent so again without a
further error. Source: DeepSeek-V3, section 3.3.2, which sends the inputs of experts in blocks of 128.
"""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
LARGEST = 448.0  # of e4m3
OFFSET = 127  # of an exponent in its byte
INFINITE = 128  # the exponent of an fp32 that is infinite


def fp8_row_bytes(width: int) -> int:
    """Return the bytes of a row of `width` values: one for each, and one for the exponent of each block."""
    return width + -(-width // BLOCK)


def to_fp8(rows_NH: Tensor) -> Tensor:
    """Encode rows of any floating-point dtype: uint8 [N, `fp8_row_bytes(H)`].

    A value's error is at most 1/16 of it, or 2^-10 of the largest in its block. A block with a value that is
    not finite decodes to values that are not finite.
    """
    rows, width = rows_NH.shape
    blocks = -(-width // BLOCK)
    padded = functional.pad(_computed(rows_NH), (0, blocks * BLOCK - width)).view(rows, blocks, BLOCK)
    largest = torch.linalg.vector_norm(padded, ord=float("inf"), dim=-1, keepdim=True).float()
    exponent = torch.frexp(largest / LARGEST).exponent.clamp(1 - OFFSET, OFFSET - 1)
    values = (padded * _power_of_two(-exponent).to(padded.dtype)).to(torch.float8_e4m3fn).view(torch.uint8)
    exponent = exponent.masked_fill(~largest.isfinite(), INFINITE)
    return torch.cat(
        (values.view(rows, blocks * BLOCK)[:, :width], (exponent[..., 0] + OFFSET).to(torch.uint8)), dim=1
    )


def from_fp8(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode what `to_fp8` has encoded: [N, H] in `dtype`."""
    rows, blocks = len(encoded), -(-encoded.shape[1] // (BLOCK + 1))
    width = encoded.shape[1] - blocks
    values = _computed(encoded[:, :width].contiguous().view(torch.float8_e4m3fn).to(dtype))
    padded = functional.pad(values, (0, blocks * BLOCK - width)).view(rows, blocks, BLOCK)
    scale = _power_of_two(encoded[:, width:].int() - OFFSET)[..., None].to(padded.dtype)
    return (padded * scale).view(rows, blocks * BLOCK)[:, :width].to(dtype)


def _computed(values: Tensor) -> Tensor:
    """Return the values in a dtype that has every power of two here: not in fp16."""
    return values.float() if values.dtype == torch.float16 else values


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, exactly on every device; exponent: int32, from -126; 128 gives infinity."""
    return ((exponent + OFFSET) << 23).view(torch.float32)
