"""Whether boxes overlap, found without comparing each with each."""

import heapq

Chunk = tuple[list[int], list[int]]  # offsets, sizes


def first_overlap(chunks: list[Chunk]) -> tuple[list[int], list[int]] | None:
    """Offsets of two boxes that share an element, or None. Boxes of no element share none.

    A sweep along the dimension in which most boxes begin at places of their own: a box is compared with those
    that it meets there.
    """
    boxes = [chunk for chunk in chunks if all(chunk[1])]
    if len(boxes) < 2:
        return None
    dims = len(boxes[0][0])
    if dims == 0:
        return boxes[0][0], boxes[1][0]
    sweep = max(range(dims), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    met: list[tuple[int, int]] = []  # (where it ends, which), of the boxes under the sweep
    for number, (offsets, sizes) in sorted(enumerate(boxes), key=lambda pair: pair[1][0][sweep]):
        while met and met[0][0] <= offsets[sweep]:
            heapq.heappop(met)
        for _, other in met:
            if _share(boxes[number], boxes[other]):
                return boxes[other][0], offsets
        heapq.heappush(met, (offsets[sweep] + sizes[sweep], number))
    return None


def _share(one: Chunk, other: Chunk) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )
