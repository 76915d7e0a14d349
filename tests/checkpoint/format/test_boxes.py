"""Boxes against what slicing a whole tensor gives: drawn shapes, ranges and cuts, and examples by hand."""

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megamoe.checkpoint.format.boxes import (
    Box,
    Cut,
    Placement,
    Shape,
    boxes_of_range,
    narrowed,
    pieces_of,
)
from megamoe.checkpoint.format.overlap import first_overlap
from megamoe.checkpoint.format.sharding import Sharding
from megamoe.parallel.layout import Layout


def numbered(shape: Shape) -> Tensor:
    """Each element is its place in the flattened tensor."""
    return torch.arange(math.prod(shape)).reshape(shape)


def taken(whole: Tensor, cut: Cut) -> Tensor:
    """What a cut leaves of a tensor: of each of its blocks the part of that index."""
    blocks = whole.chunk(cut.stride, cut.dim) if cut.stride > 1 else (whole,)
    return torch.cat([block.chunk(cut.count, cut.dim)[cut.index] for block in blocks], cut.dim)


def draw_placement(rng: random.Random) -> Placement:
    dims = rng.randint(1, 4)
    cuts = []
    logical = [rng.randint(1, 4) for _ in range(dims)]
    for dim in rng.sample(range(dims), rng.randint(0, min(2, dims))):
        count, stride = rng.randint(1, 3), rng.randint(1, 2)
        logical[dim] *= count * stride
        cuts.append(Cut(dim, rng.randrange(count), count, stride))
    part = list(logical)
    for cut in cuts:
        part[cut.dim] //= cut.count
    return Placement(tuple(part), tuple(cuts))


@pytest.mark.parametrize("seed", range(100))
def test_a_range_is_its_boxes_in_their_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    start, stop = sorted(rng.randint(0, math.prod(shape)) for _ in range(2))
    boxes = list(boxes_of_range(shape, start, stop))
    found = [narrowed(numbered(shape), box).flatten() for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("seed", range(100))
def test_what_a_rank_holds_lies_where_slicing_finds_it(seed: int) -> None:
    rng = random.Random(seed)
    placement = draw_placement(rng)
    whole = held = numbered(placement.logical)
    for cut in placement.cuts:
        held = taken(held, cut)
    assert tuple(held.shape) == placement.shape
    start, stop = sorted(rng.randint(0, held.numel()) for _ in range(2))
    flat = held.flatten()[start:stop]
    pieces = list(pieces_of("w", placement, flat, start))
    for piece in pieces:
        assert piece.shape == placement.logical
        assert torch.equal(narrowed(whole, piece.box), piece.tensor)
    seen = torch.cat([torch.empty(0, dtype=torch.long), *(it.tensor.flatten() for it in pieces)])
    assert sorted(seen.tolist()) == sorted(flat.tolist())


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_views_into_what_is_held(seed: int) -> None:
    placement = draw_placement(random.Random(seed))
    flat = torch.zeros(math.prod(placement.shape))
    for piece in pieces_of("w", placement, flat):
        piece.tensor.copy_(narrowed(numbered(placement.logical), piece.box))
    held = numbered(placement.logical)
    for cut in placement.cuts:
        held = taken(held, cut)
    assert torch.equal(flat.view(placement.shape), held.float())


@pytest.mark.parametrize("seed", range(40))
def test_the_ranks_of_a_layout_hold_all_of_it_equally_often(seed: int) -> None:
    rng = random.Random(seed)
    layout = rng.choice([Layout(4, 2, 2, 1), Layout(8, 2, 2, 2), Layout(4, 4, 1, 4), Layout(6, 1, 3, 2)])
    sharding = rng.choice([Sharding(tensor=(1, 2)), Sharding(expert=True, slices=(1, 2)), Sharding()])
    part = (2, 4, 3)
    logical = sharding.placement(part, layout, 0).logical
    count = torch.zeros(logical, dtype=torch.long)
    for rank in range(layout.ranks):
        placement = sharding.placement(part, layout, rank)
        for box, _ in placement.parts(Box((0, 0, 0), part)):
            narrowed(count, box).add_(1)
    assert count.min() == count.max() == layout.ranks * math.prod(part) / math.prod(logical)


def test_a_matrix_by_hand() -> None:
    # Elements 5 to 17 of 4 rows of 6: the end of row 0, row 1, the beginning of row 2.
    assert list(boxes_of_range((4, 6), 5, 17)) == [
        Box((0, 5), (1, 1)),
        Box((1, 0), (1, 6)),
        Box((2, 0), (1, 5)),
    ]
    assert list(boxes_of_range((4, 6), 13, 16)) == [Box((2, 1), (1, 3))]
    assert list(boxes_of_range((4, 6), 6, 18)) == [Box((1, 0), (2, 6))]
    assert list(boxes_of_range((4, 6), 7, 7)) == []
    assert list(boxes_of_range((), 0, 1)) == [Box((), ())]


def test_a_gated_weight_by_hand() -> None:
    """Gate rows 0 to 3, value rows 4 to 7; the second of two ranks has rows 2, 3, 6, 7."""
    placement = Placement((4, 1), (Cut(0, 1, 2, 2),))
    assert placement.logical == (8, 1)
    assert list(placement.parts(Box((1, 0), (2, 1)))) == [
        (Box((3, 0), (1, 1)), Box((0, 0), (1, 1))),
        (Box((6, 0), (1, 1)), Box((1, 0), (1, 1))),
    ]


def test_experts_and_their_slices_by_hand() -> None:
    """8 ranks, EP 2, ETP 2, TP 2; of 4 experts rank 6 holds 2 and 3, and of each half the first slice."""
    layout = Layout(8, 2, 2, 2)
    placement = Sharding(expert=True, slices=(1, 2)).placement((2, 4, 3), layout, 6)
    assert placement.cuts == (Cut(0, 1, 2), Cut(1, 0, 2, 2))
    boxes = [box for box, _ in placement.parts(Box((0, 0, 0), (2, 4, 3)))]
    assert boxes == [Box((2, 0, 0), (2, 2, 3)), Box((2, 4, 0), (2, 2, 3))]


@pytest.mark.parametrize("seed", range(60))
def test_overlaps_are_found_and_nothing_else(seed: int) -> None:
    """Ranges that follow each other have none; one of them moved back by an element has, if it can move."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
    total = math.prod(shape)
    bounds = sorted({0, total, *(rng.randint(0, total) for _ in range(4))})
    ranges = list(pairwise(bounds))

    def chunks_of(ranges: list[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
        boxes = [box for start, stop in ranges for box in boxes_of_range(shape, start, stop)]
        rng.shuffle(boxes)
        return [(list(box.offsets), list(box.sizes)) for box in boxes]

    assert first_overlap(chunks_of(ranges)) is None
    if len(ranges) > 1:
        moved = [ranges[0], (ranges[1][0] - 1, ranges[1][1]), *ranges[2:]]
        assert first_overlap(chunks_of(moved)) is not None
