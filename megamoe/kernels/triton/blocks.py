"""Block sizes of the Triton kernels: a fixed table, so that no run tries out candidates at its start."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

LARGEST_BLOCK = 1024  # columns that one program of a pass over rows holds at a time
AMPERE, HOPPER = 8, 9  # major compute capabilities; later ones have the tiles of Hopper
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
# it, for which 128 columns would spill registers. `to_weight`: the gradient of the weights. Tensor cores do
# not multiply fp32, so its tiles are the same everywhere.
TILES: dict[tuple[str, int, int], Tile] = {
    ("product", 2, AMPERE): Tile(128, 128, 32, 8, 4),
    ("up", 2, AMPERE): Tile(128, 64, 32, 8, 4),
    ("down_backward", 2, AMPERE): Tile(128, 64, 32, 8, 4),
    ("to_weight", 2, AMPERE): Tile(128, 128, 32, 8, 4),
    ("product", 2, HOPPER): Tile(128, 128, 64, 8, 4),
    ("up", 2, HOPPER): Tile(128, 64, 64, 8, 4),
    ("down_backward", 2, HOPPER): Tile(128, 64, 64, 8, 4),
    ("to_weight", 2, HOPPER): Tile(128, 128, 64, 8, 4),
    ("product", 4, AMPERE): Tile(64, 64, 16, 4, 3),
    ("up", 4, AMPERE): Tile(64, 32, 16, 4, 3),
    ("down_backward", 4, AMPERE): Tile(64, 32, 16, 4, 3),
    ("to_weight", 4, AMPERE): Tile(64, 64, 16, 4, 3),
}
SMALL_TILE = Tile(32, 32, 16, 4, 2)


def row_block(width: int) -> int:
    """Return the columns that one program of a pass over rows handles at a time."""
    return min(LARGEST_BLOCK, triton.next_power_of_2(max(width, 1)))


def tile_for(kind: str, sample: torch.Tensor) -> Tile:
    """Return the tile of a product of that kind over numbers such as those of `sample`."""
    return tile_of(kind, sample.element_size(), _major(sample.device))


def tile_of(kind: str, size: int, major: int) -> Tile:
    """Return the tile for numbers of `size` bytes on GPUs of that major compute capability.

    A capability that is not in the table has the tile of the nearest older one.
    """
    if major == INTERPRETED:
        return SMALL_TILE
    known = [key[2] for key in TILES if key[:2] == (kind, size) and key[2] <= major]
    return TILES[kind, size, max(known, default=AMPERE)]


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else INTERPRETED
