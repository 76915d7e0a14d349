"""Chunks against slices of the global tensor: random shapes, ranges and shardings, and examples by hand."""

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megamoe.parallel.chunks import (
    Chunk,
    DimShard,
    Placement,
    Shape,
    Sharding,
    chunk_view,
    chunks_of_range,
    first_overlap,
    local_chunks_of,
    most_chunks,
)
from megamoe.parallel.layout import Layout


def numbered(shape: Shape) -> Tensor:
    """Each element is its place in the flattened tensor."""
    return torch.arange(math.prod(shape)).reshape(shape)


def taken(whole: Tensor, cut: DimShard) -> Tensor:
    """Return a slice of a tensor: of each of its blocks the part with that index."""
    blocks = whole.chunk(cut.stride, cut.dim) if cut.stride > 1 else (whole,)
    return torch.cat([block.chunk(cut.count, cut.dim)[cut.index] for block in blocks], cut.dim)


def draw_placement(rng: random.Random) -> Placement:
    dims = rng.randint(1, 4)
    cuts = []
    global_shape = [rng.randint(1, 4) for _ in range(dims)]
    for dim in rng.sample(range(dims), rng.randint(0, min(2, dims))):
        count, stride = rng.randint(1, 3), rng.randint(1, 2)
        global_shape[dim] *= count * stride
        cuts.append(DimShard(dim, rng.randrange(count), count, stride))
    part = list(global_shape)
    for cut in cuts:
        part[cut.dim] //= cut.count
    return Placement(tuple(part), tuple(cuts))


@pytest.mark.parametrize("seed", range(100))
def test_a_range_is_its_chunks_in_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    start, stop = sorted(rng.randint(0, math.prod(shape)) for _ in range(2))
    chunks = list(chunks_of_range(shape, start, stop))
    found = [chunk_view(numbered(shape), chunk).flatten() for chunk in chunks]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))
    assert all(chunk.numel for chunk in chunks)
    assert len(chunks) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("seed", range(100))
def test_local_chunks_are_the_slices_of_the_global_tensor(seed: int) -> None:
    rng = random.Random(seed)
    placement = draw_placement(rng)
    whole = held = numbered(placement.global_shape)
    for cut in placement.dim_shards:
        held = taken(held, cut)
    assert tuple(held.shape) == placement.local_shape
    start, stop = sorted(rng.randint(0, held.numel()) for _ in range(2))
    flat = held.flatten()[start:stop]
    local_chunks = list(local_chunks_of("w", placement, flat, start))
    for local in local_chunks:
        assert local.global_shape == placement.global_shape
        assert torch.equal(chunk_view(whole, local.chunk), local.tensor)
    seen = torch.cat([torch.empty(0, dtype=torch.long), *(it.tensor.flatten() for it in local_chunks)])
    assert sorted(seen.tolist()) == sorted(flat.tolist())


@pytest.mark.parametrize("seed", range(40))
def test_local_chunks_are_views_into_the_local_tensor(seed: int) -> None:
    placement = draw_placement(random.Random(seed))
    flat = torch.zeros(math.prod(placement.local_shape))
    for local in local_chunks_of("w", placement, flat):
        local.tensor.copy_(chunk_view(numbered(placement.global_shape), local.chunk))
    held = numbered(placement.global_shape)
    for cut in placement.dim_shards:
        held = taken(held, cut)
    assert torch.equal(flat.view(placement.local_shape), held.float())


@pytest.mark.parametrize("seed", range(40))
def test_the_ranks_of_a_layout_hold_each_element_equally_often(seed: int) -> None:
    rng = random.Random(seed)
    layout = rng.choice([Layout(4, 2, 2, 1), Layout(8, 2, 2, 2), Layout(4, 4, 1, 4), Layout(6, 1, 3, 2)])
    sharding = rng.choice([Sharding(tensor=(1, 2)), Sharding(expert=True, slices=(1, 2)), Sharding()])
    part = (2, 4, 3)
    global_shape = sharding.placement(part, layout, 0).global_shape
    count = torch.zeros(global_shape, dtype=torch.long)
    for rank in range(layout.ranks):
        placement = sharding.placement(part, layout, rank)
        for chunk, _ in placement.global_chunks(Chunk((0, 0, 0), part)):
            chunk_view(count, chunk).add_(1)
    assert count.min() == count.max() == layout.ranks * math.prod(part) / math.prod(global_shape)


@pytest.mark.parametrize(("dims", "most"), [(1, 2), (2, 6), pytest.param(3, 10, marks=pytest.mark.full)])
def test_no_rank_holds_more_chunks_than_the_bound(dims: int, most: int) -> None:
    """Every range of a small local tensor, under every sharding that `placements` and `hf` know."""
    assert most_chunks(dims) == most
    layout, part, counts = Layout(8, 2, 2, 2), (4, 4, 4)[:dims], set()
    cuts = [(dim, blocks) for dim in range(dims) for blocks in (1, 2)]
    experts = [Sharding(expert=True, slices=(dim, blocks)) for dim, blocks in cuts if dim > 0]
    for sharding in [Sharding(), *(Sharding(tensor=cut) for cut in cuts if cut[0] < 2), *experts]:
        placement = sharding.placement(part, layout, rank=5)
        for start in range(math.prod(part)):
            for stop in range(start + 1, math.prod(part) + 1):
                flat = torch.empty(stop - start)
                counts.add(sum(1 for _ in local_chunks_of("w", placement, flat, start)))
    assert most / 2 <= max(counts) <= most


def test_a_matrix_by_hand() -> None:
    # Elements 5 to 17 of 4 rows of 6: the end of row 0, row 1, the beginning of row 2.
    assert list(chunks_of_range((4, 6), 5, 17)) == [
        Chunk((0, 5), (1, 1)),
        Chunk((1, 0), (1, 6)),
        Chunk((2, 0), (1, 5)),
    ]
    assert list(chunks_of_range((4, 6), 13, 16)) == [Chunk((2, 1), (1, 3))]
    assert list(chunks_of_range((4, 6), 6, 18)) == [Chunk((1, 0), (2, 6))]
    assert list(chunks_of_range((4, 6), 7, 7)) == []
    assert list(chunks_of_range((), 0, 1)) == [Chunk((), ())]


def test_a_gated_weight_by_hand() -> None:
    """Gate rows 0 to 3, value rows 4 to 7; the second of two ranks has rows 2, 3, 6, 7."""
    placement = Placement((4, 1), (DimShard(0, 1, 2, 2),))
    assert placement.global_shape == (8, 1)
    assert list(placement.global_chunks(Chunk((1, 0), (2, 1)))) == [
        (Chunk((3, 0), (1, 1)), Chunk((0, 0), (1, 1))),
        (Chunk((6, 0), (1, 1)), Chunk((1, 0), (1, 1))),
    ]


def test_experts_and_their_slices_by_hand() -> None:
    """8 ranks, EP 2, ETP 2, TP 2; of 4 experts rank 6 holds 2 and 3, and of each half the first slice."""
    layout = Layout(8, 2, 2, 2)
    placement = Sharding(expert=True, slices=(1, 2)).placement((2, 4, 3), layout, 6)
    assert placement.dim_shards == (DimShard(0, 1, 2), DimShard(1, 0, 2, 2))
    chunks = [chunk for chunk, _ in placement.global_chunks(Chunk((0, 0, 0), (2, 4, 3)))]
    assert chunks == [Chunk((2, 0, 0), (2, 2, 3)), Chunk((2, 4, 0), (2, 2, 3))]


@pytest.mark.parametrize("seed", range(60))
def test_overlaps_are_found(seed: int) -> None:
    """Ranges that follow each other have none; one of them moved back by an element has, if it can move."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
    total = math.prod(shape)
    bounds = sorted({0, total, *(rng.randint(0, total) for _ in range(4))})
    ranges = list(pairwise(bounds))

    def chunks_of(ranges: list[tuple[int, int]]) -> list[Chunk]:
        chunks = [chunk for start, stop in ranges for chunk in chunks_of_range(shape, start, stop)]
        rng.shuffle(chunks)
        return chunks

    assert first_overlap(chunks_of(ranges)) is None
    if len(ranges) > 1:
        moved = [ranges[0], (ranges[1][0] - 1, ranges[1][1]), *ranges[2:]]
        assert first_overlap(chunks_of(moved)) is not None
