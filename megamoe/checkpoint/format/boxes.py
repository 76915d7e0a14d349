"""Where a rank's part of a tensor lies in the whole one: boxes, and how layouts and ZeRO cut them.

The logical tensor is the one that a single rank would hold. A rank holds a box of it, or, where a gated
weight is cut in each of its halves, a few; ZeRO gives it a range of that part's flattened elements, which is
a few boxes again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A hyperrectangle of a tensor: where it begins and how large it is, in each dimension."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """How many elements it has; 1 without dimensions."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Cut:
    """One dimension dealt to `count` ranks, of which `index` is this one.

    stride: how many equal blocks follow each other in the dimension, each cut for itself (2 for the gate and
    the value of a gated weight, 1 for anything else).
    """

    dim: int
    index: int
    count: int
    stride: int = 1


@dataclass(frozen=True)
class Placement:
    """A rank's part of a tensor, by the cuts that made it; shape: of the part."""

    shape: Shape
    cuts: tuple[Cut, ...] = ()

    @property
    def logical(self) -> Shape:
        """Shape of the whole tensor."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] *= cut.count
        return tuple(shape)

    def parts(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """A box of this rank's part, as (box of the logical tensor, where that is within `box`)."""
        ranges = [[(0, offset, size)] for offset, size in zip(box.offsets, box.sizes, strict=True)]
        for cut in self.cuts:
            ranges[cut.dim] = list(self._split(cut, box.offsets[cut.dim], box.sizes[cut.dim]))
        for choice in product(*ranges):
            inner, outer, sizes = zip(*choice, strict=True) if choice else ((), (), ())
            yield Box(tuple(outer), tuple(sizes)), Box(tuple(inner), tuple(sizes))

    def _split(self, cut: Cut, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(where in the range, where in the logical dimension, how many) of a range of a cut dimension."""
        block = self.shape[cut.dim] // cut.stride
        at = start
        while at < start + size:
            number, inside = divmod(at, block)
            length = min(block - inside, start + size - at)
            yield at - start, (number * cut.count + cut.index) * block + inside, length
            at += length


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a flattened tensor as boxes, each of which is contiguous, in their order.

    Of a matrix at most three: the rest of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
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
        yield Box((whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest))
    if whole_to <= last:
        yield from _within_row(shape, last, 0, stop - last * row)


def _within_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor, and the elements that this rank has of it.

    tensor: a view of the box's shape into what the rank holds, to be read or to be filled.
    """

    name: str
    shape: Shape
    box: Box
    tensor: Tensor

    def renamed(self, name: str) -> "Piece":
        """The same of a tensor of another name."""
        return replace(self, name=name)


def pieces_of(name: str, placement: Placement, flat: Tensor, start: int = 0) -> Iterator[Piece]:
    """What the flat tensor holds of the logical one: elements [start, ...) of the rank's flattened part."""
    at = 0
    for box in boxes_of_range(placement.shape, start, start + flat.numel()):
        view = flat.narrow(0, at, box.numel).view(box.sizes)
        at += box.numel
        for logical, inside in placement.parts(box):
            yield Piece(name, placement.logical, logical, narrowed(view, inside))


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """The view of a box."""
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
