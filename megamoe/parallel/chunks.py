"""Chunks of tensors: which chunks of a global tensor a rank holds under a parallel layout and ZeRO.

The words are those of torch.distributed.checkpoint. The global tensor is the one that a single rank would
hold. A chunk is a hyperrectangle of it: offsets and sizes. A rank holds one chunk of a sharded tensor, or one
for each half of a gated weight. ZeRO gives the rank a range of its flattened local tensor, which is again a
few chunks.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor

from megamoe.parallel.layout import Layout

Shape = tuple[int, ...]
MOST_BLOCKS = 2  # of a sharded dimension: the gate and the value of a gated weight


@dataclass(frozen=True)
class Chunk:
    """A hyperrectangle of a tensor, by its offset and its size in each dimension."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """The number of elements; 1 if there are no dimensions."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class DimShard:
    """How one dimension is sharded over `count` ranks, of which this rank has the number `index`.

    stride: the number of equal blocks that the dimension consists of, each of which is sharded by itself: 2
    for the gate and the value of a gated weight, else 1. It is `partition_stride` of Megatron-Core.
    """

    dim: int
    index: int
    count: int
    stride: int = 1


@dataclass(frozen=True)
class Placement:
    """How a rank's local tensor, of shape `local_shape`, lies in the global tensor."""

    local_shape: Shape
    dim_shards: tuple[DimShard, ...] = ()

    @property
    def global_shape(self) -> Shape:
        """The shape of the global tensor."""
        shape = list(self.local_shape)
        for shard in self.dim_shards:
            shape[shard.dim] *= shard.count
        return tuple(shape)

    def global_chunks(self, chunk: Chunk) -> Iterator[tuple[Chunk, Chunk]]:
        """Yield the chunks of the global tensor that a chunk of the local tensor consists of.

        Each comes as (chunk of the global tensor, the same elements as a chunk of `chunk`).
        """
        ranges = [[(0, offset, size)] for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        for shard in self.dim_shards:
            ranges[shard.dim] = list(self._split(shard, chunk.offsets[shard.dim], chunk.sizes[shard.dim]))
        for choice in product(*ranges):
            inner, outer, sizes = zip(*choice, strict=True) if choice else ((), (), ())
            yield Chunk(tuple(outer), tuple(sizes)), Chunk(tuple(inner), tuple(sizes))

    def _split(self, shard: DimShard, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Split a range of a sharded dimension at its blocks.

        Yields (offset in the range, offset in the global dimension, length).
        """
        block = self.local_shape[shard.dim] // shard.stride
        at = start
        while at < start + size:
            number, inside = divmod(at, block)
            length = min(block - inside, start + size - at)
            yield at - start, (number * shard.count + shard.index) * block + inside, length
            at += length


@dataclass(frozen=True)
class Sharding:
    """The dimensions along which layouts shard a parameter; it does not depend on the layout.

    tensor: (dimension, blocks) under tensor parallelism. expert: whether expert parallelism shards the first
    dimension. slices: (dimension, blocks) under expert tensor parallelism. Blocks: `DimShard.stride`.
    The attributes are the keys in index.json.
    """

    tensor: tuple[int, int] | None = None
    expert: bool = False
    slices: tuple[int, int] | None = None

    def placement(self, shape: tuple[int, ...], layout: Layout, rank: int) -> Placement:
        """Return the placement of the rank's local tensor, whose shape is `shape`."""
        cuts = (
            (self.tensor, layout.tensor_rank(rank), layout.tensor),
            ((0, 1) if self.expert else None, layout.expert_rank(rank), layout.expert),
            (self.slices, rank % layout.expert_tensor, layout.expert_tensor),
        )
        shards = (DimShard(cut[0], index, count, cut[1]) for cut, index, count in cuts if cut and count > 1)
        return Placement(shape, tuple(shards))

    def to_json(self) -> dict[str, Any]:
        """Return the attributes that are set, as plain data."""
        return {name: value for name, value in vars(self).items() if value}


def chunks_of_range(shape: Shape, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks that elements [start, stop) of a flattened tensor consist of.

    The chunks are contiguous and come in the order of the elements. A matrix gives three at most: the end of
    a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield Chunk((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _within_row(shape, first, start - first * row, stop - first * row)
        return
    whole_from = first if start == first * row else first + 1
    whole_to = stop // row
    if whole_from > first:
        yield from _within_row(shape, first, start - first * row, row)
    if whole_to > whole_from:
        rest = shape[1:]
        yield Chunk((whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest))
    if whole_to <= last:
        yield from _within_row(shape, last, 0, stop - last * row)


def _within_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Chunk]:
    for chunk in chunks_of_range(shape[1:], start, stop):
        yield Chunk((row, *chunk.offsets), (1, *chunk.sizes))


def most_chunks(dims: int) -> int:
    """Return the largest number of chunks in which a rank can hold a tensor of so many dimensions.

    ZeRO's range of the local tensor is at most a chunk of whole rows, and two for each further dimension, at
    the beginning and at the end: `chunks_of_range`. Each may lie in both blocks of a gated weight.
    """
    return MOST_BLOCKS * max(1, 2 * dims - 1)


@dataclass(frozen=True)
class LocalChunk:
    """A chunk of the global tensor `name`, with the memory in which this rank holds it.

    tensor: a view of the chunk's shape into that memory. A save reads it, a load fills it.
    """

    name: str
    global_shape: Shape
    chunk: Chunk
    tensor: Tensor


def local_chunks_of(name: str, placement: Placement, flat: Tensor, start: int = 0) -> Iterator[LocalChunk]:
    """Yield the chunks in `flat`: elements [start, start + len(flat)) of the flattened local tensor."""
    at = 0
    for chunk in chunks_of_range(placement.local_shape, start, start + flat.numel()):
        view = flat.narrow(0, at, chunk.numel).view(chunk.sizes)
        at += chunk.numel
        for global_chunk, inside in placement.global_chunks(chunk):
            yield LocalChunk(name, placement.global_shape, global_chunk, chunk_view(view, inside))


def whole_tensor(name: str, tensor: Tensor) -> LocalChunk:
    """Return a tensor as the one chunk that fills it."""
    shape = tuple(tensor.shape)
    return LocalChunk(name, shape, Chunk((0,) * len(shape), shape), tensor.detach())


def chunk_view(tensor: Tensor, chunk: Chunk) -> Tensor:
    """Return a view of a chunk of the tensor."""
    return tensor[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]


def first_overlap(chunks: Iterable[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks of the same tensor that share an element, or None. Empty chunks overlap with none.

    The search sweeps along the dimension in which the chunks have the most different offsets. It compares a
    chunk with those only that it meets there.
    """
    filled = [chunk for chunk in chunks if all(chunk.sizes)]
    if len(filled) < 2:
        return None
    dims = len(filled[0].offsets)
    if dims == 0:
        return filled[0], filled[1]
    sweep = max(range(dims), key=lambda dim: len({chunk.offsets[dim] for chunk in filled}))
    active: list[tuple[int, int]] = []  # (end, number) of the chunks that the sweep is inside of
    for number, chunk in sorted(enumerate(filled), key=lambda pair: pair[1].offsets[sweep]):
        while active and active[0][0] <= chunk.offsets[sweep]:
            heapq.heappop(active)
        for _, other in active:
            if _overlap(chunk, filled[other]):
                return filled[other], chunk
        heapq.heappush(active, (chunk.offsets[sweep] + chunk.sizes[sweep], number))
    return None


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )
