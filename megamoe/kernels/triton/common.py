"""What the Triton kernels share: block sizes (a fixed table), loads and stores of tiles, partial sums, and
costs.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel

LARGEST_BLOCK = 1024  # columns that one program of a pass over rows holds at a time
AMPERE, HOPPER, BLACKWELL = 8, 9, 10  # major compute capabilities; each has the tiles of the one before
INTERPRETED = 0  # tensors of the CPU


@dataclass(frozen=True)
class Tile:
    """The block of one program of a matrix product: [rows, columns] of the result, `depth` of the sum at a
    time. warps, stages: Triton's num_warps and num_stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """Return the keywords of a launch."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


# By (kind of product, bytes of a number, major compute capability). `product`: rows times a weight. `up`:
# the same with two results at a time, gate and value. `down_backward`: with the activation's gradient behind
# it; `weighted_down_backward`: and that of the routing's weights. `to_weight`: the gradient of the weights.
# Those of Hopper are the fastest of those tried on an H100 (docs/scale/gpu.md), where 128 columns are faster
# for `down_backward` although they spill registers. The weighted form and Blackwell's were not tried, and do
# not spill. Tensor cores do not multiply fp32, so its tiles are the same everywhere.
TILES: dict[tuple[str, int, int], Tile] = {
    ("product", 2, AMPERE): Tile(128, 128, 32, 8, 4),
    ("up", 2, AMPERE): Tile(128, 64, 32, 8, 4),
    ("down_backward", 2, AMPERE): Tile(128, 64, 32, 8, 4),
    ("weighted_down_backward", 2, AMPERE): Tile(128, 64, 32, 8, 4),
    ("to_weight", 2, AMPERE): Tile(128, 128, 32, 8, 4),
    ("product", 2, HOPPER): Tile(128, 256, 64, 8, 3),
    ("up", 2, HOPPER): Tile(128, 128, 64, 8, 4),
    ("down_backward", 2, HOPPER): Tile(128, 128, 64, 8, 4),
    ("weighted_down_backward", 2, HOPPER): Tile(128, 64, 64, 8, 4),
    ("to_weight", 2, HOPPER): Tile(128, 256, 64, 8, 3),
    ("down_backward", 2, BLACKWELL): Tile(128, 64, 64, 8, 4),
    ("product", 4, AMPERE): Tile(64, 64, 16, 4, 3),
    ("up", 4, AMPERE): Tile(64, 32, 16, 4, 3),
    ("down_backward", 4, AMPERE): Tile(64, 32, 16, 4, 3),
    ("weighted_down_backward", 4, AMPERE): Tile(64, 32, 16, 4, 3),
    ("to_weight", 4, AMPERE): Tile(64, 64, 16, 4, 3),
}
SMALL_TILE = Tile(32, 32, 16, 4, 2)


# `triton.cdiv` and `triton.next_power_of_2` take 3 us a call, because kernels may call them too.


def cdiv(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def row_block(width: int) -> int:
    """Return the columns that one program of a pass over rows handles at a time."""
    return min(LARGEST_BLOCK, next_power_of_2(max(width, 1)))


def tile_for(kind: str, sample: torch.Tensor) -> Tile:
    """Return the tile of a product of that kind over numbers such as those of `sample`."""
    return tile_of(kind, sample.element_size(), _major(sample.device), _shared_bytes(sample.device))


def tile_of(kind: str, size: int, major: int, shared: int | None = None) -> Tile:
    """Return the tile for numbers of `size` bytes on GPUs of that major compute capability.

    A capability that is not in the table has the tile of the nearest older one. shared: bytes of shared
    memory that a program may have; a tile that needs more gives way to that of an older capability. None: not
    known.
    """
    if major == INTERPRETED:
        return SMALL_TILE
    known = [key[2] for key in TILES if key[:2] == (kind, size) and key[2] <= major] or [AMPERE]
    for capability in sorted(known, reverse=True):
        tile = TILES[kind, size, capability]
        if shared is None or staged_bytes(kind, size, tile) <= shared:
            return tile
    return TILES[kind, size, min(known)]


def staged_bytes(kind: str, size: int, tile: Tile) -> int:
    """Return the shared memory that a tile's stages take at most; `up` has two blocks of weights."""
    columns = tile.columns * (2 if kind == "up" else 1)
    return tile.stages * (tile.rows + columns) * tile.depth * size


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else INTERPRETED


@cache
def _shared_bytes(device: torch.device) -> int | None:
    """Return the shared memory that one program may ask for; None where PyTorch does not say."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    optional = getattr(found, "shared_memory_per_block_optin", 0)
    return optional or getattr(found, "shared_memory_per_block", None) or None


@cache
def programs_of(device: torch.device, otherwise: int) -> int:
    """Return how many programs share a sum over all rows: two for each multiprocessor of a GPU."""
    if device.type != "cuda":
        return otherwise
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def bytes_of(*tensors: Tensor | None) -> int:
    """Return the size of these tensors, each read or written once."""
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def each_once(*arguments: object, result: None) -> int:
    """Return the size of all tensors of a call: each is read or written once."""
    return bytes_of(*(each for each in arguments if isinstance(each, Tensor)))


# Arguments of kernels that differ between micro batches: numbers of rows, tokens, pairs and blocks. Triton
# would compile a kernel again where one of them is 1, or begins or ceases to be a multiple of 16.
VARYING = ["count", "parts", "tokens", "pairs", "blocks", "steps"]
COLUMNS = 128  # of a program
PARTS = 16  # that it adds at a time


def sum_parts(part_PX: Tensor, out_X: Tensor) -> None:
    """Write the sum over the first dimension, fp32, in one order, into `out_X` in its dtype."""
    columns = out_X.numel()
    arguments = (part_PX, len(part_PX), columns, out_X)
    run_kernel(_sum_parts, (cdiv(columns, COLUMNS),), *arguments, ROWS=PARTS, BLOCK=COLUMNS)


@triton.jit(do_not_specialize=VARYING)
def _sum_parts(part, parts, columns, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program adds up BLOCK columns."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        inside = (row < parts)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        sum += tl.sum(tl.load(part + place, mask=inside, other=0), axis=0)
    tl.store(out + column, sum.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def inside(row, column, rows, columns):  # type: ignore[no-untyped-def]
    """Return which places of a block lie in a matrix of so many rows and columns."""
    return (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def load_block(matrix, row, column, rows, columns):  # type: ignore[no-untyped-def]
    """Return matrix[row, column], 0 beyond the edges."""
    place = row[:, None] * columns + column[None, :]
    return tl.load(matrix + place, mask=inside(row, column, rows, columns), other=0)


@triton.jit
def load_transposed(matrix, row, column, rows, columns):  # type: ignore[no-untyped-def]
    """Return matrix[row, column]^T, 0 beyond the edges."""
    place = row[None, :] * columns + column[:, None]
    return tl.load(matrix + place, mask=inside(column, row, columns, rows), other=0)


@triton.jit
def store_block(matrix, row, column, rows, columns, block):  # type: ignore[no-untyped-def]
    """Write matrix[row, column] = block, rounded to the matrix's numbers, within the edges."""
    place = row[:, None] * columns + column[None, :]
    numbers = block.to(matrix.dtype.element_ty)
    tl.store(matrix + place, numbers, mask=inside(row, column, rows, columns))
