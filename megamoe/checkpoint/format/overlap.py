"""Whether chunks of a tensor overlap, found without comparing each chunk with each."""

import heapq
from collections.abc import Iterable

from megamoe.checkpoint.format.chunks import Chunk


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
