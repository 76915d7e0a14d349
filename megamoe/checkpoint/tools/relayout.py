"""A checkpoint cut anew: the files that the ranks of another layout would read, each its own.

A checkpoint is loaded at any layout as it is. Cut for the layout that loads it, each rank opens its own file
and reads it from one end to the other.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megamoe.checkpoint.format.boxes import Box, Placement, Shape, boxes_of_range
from megamoe.checkpoint.format.files import INDEX, META, read_json, shard_file
from megamoe.checkpoint.format.reader import MOMENTS, WEIGHT, Saved, chunk_key, moment_name
from megamoe.checkpoint.format.sharding import Sharding
from megamoe.checkpoint.tools.consolidate import count_parameters
from megamoe.checkpoint.tools.stream import Part, new_folder, whole, write_json, write_tensors
from megamoe.checkpoint.tools.verify import refuse_damaged
from megamoe.errors import UserError
from megamoe.parallel.layout import Layout

RANDOM_OF = re.compile(r"random/([0-9]{5,9})/")
MOST_RANKS = 99_999  # a file's name has five digits
MOST_PARTS = 5_000_000  # of all tensors: each takes memory, here and in the index that every rank reads
# Keys of the run's configuration that tensor parallelism must divide, but for what is seen in the weights.
TENSOR_DIVIDES = (
    ("model", "num_attention_heads"),
    ("model", "num_query_groups"),
    ("model", "vocab_multiple"),
    ("data", "sequence_length"),
)


def relayout(source: Path, path: Path, layout: Layout, zero_stage: int | None = None) -> None:
    """Write a checkpoint of the same state at `path`, cut for that layout.

    zero_stage: at 1 and above weights and moments are dealt evenly to the ranks that hold the same of them;
    None: the one that saved. Random states stay those of the ranks that saved.

    Raises:
        UserError: if the checkpoint is damaged, the layout does not divide it, or `path` exists.
    """
    _check_ranks(layout)
    refuse_damaged(source)
    with Saved(source) as saved:
        _check_parts(saved, layout)
        _check_divisions(saved, layout)
        stage = saved.meta["layout"]["zero_stage"] if zero_stage is None else zero_stage
        with new_folder(path, source) as folder:
            _write(saved, folder, layout, stage)


def _write(saved: Saved, folder: Path, layout: Layout, stage: int) -> None:
    shards: list[dict[str, Part]] = [{} for _ in range(layout.ranks)]
    tensors: dict[str, Any] = {}
    for name, rank, box in _deal(saved, layout, stage):
        shape, part = saved.shape(name), Part(name, box, saved.dtype(name))
        shards[rank][chunk_key(name, shape, box.offsets, box.sizes)] = part
        meta = {"dtype": saved.index["tensors"][name]["dtype"], "shape": shape, "chunks": []}
        tensors.setdefault(name, meta)["chunks"].append([rank, list(box.offsets), list(box.sizes)])
    for rank, parts in enumerate(shards):
        if parts:
            write_tensors(folder / shard_file(rank), parts, saved)
    write_json(folder / INDEX, {"tensors": tensors, "shardings": saved.index["shardings"]})
    write_json(folder / META, _meta(saved, layout, stage), indent=1)


def _meta(saved: Saved, layout: Layout, stage: int) -> dict[str, Any]:
    meta = read_json(saved.path / META)
    sizes = {name: getattr(layout, name) for name in ("ranks", "tensor", "expert", "expert_tensor")}
    before = meta.get("random_layout", meta["layout"])
    meta["random_layout"] = {name: before[name] for name in ("ranks", "tensor")}
    meta["layout"] = {**meta["layout"], **sizes, "zero_stage": stage}
    parallel = meta["config"].get("parallel")
    if isinstance(parallel, dict):
        cut = {name: sizes[name] for name in ("tensor", "expert", "expert_tensor")}
        sequence = {} if layout.tensor > 1 else {"sequence": False}
        meta["config"] = {**meta["config"], "parallel": {**parallel, **cut, **sequence}}
    return meta


def _deal(saved: Saved, layout: Layout, stage: int) -> Iterator[tuple[str, int, Box]]:
    """(tensor, rank, box of it): who writes what."""
    load = [0] * layout.ranks  # bytes
    for name in sorted(saved.names()):
        shape, sharding = saved.shape(name), _sharding(saved, name)
        if sharding is None:
            boxes = iter([(_whole_to(name, layout, load), whole(shape))])
        else:
            boxes = _cut(tuple(shape), sharding, layout, stage, lambda rank: load[rank])
        for rank, box in boxes:
            load[rank] += box.numel * saved.dtype(name).itemsize
            yield name, rank, box


def _sharding(saved: Saved, name: str) -> Sharding | None:
    """Of a weight and its moments; None: nothing cuts it (a buffer, a count, a random state)."""
    for prefix in (WEIGHT, *(moment_name(moment, "") for moment in MOMENTS)):
        parameter = name.removeprefix(prefix)
        if name.startswith(prefix) and parameter in saved.index["shardings"]:
            return Sharding.from_json(dict(saved.index["shardings"][parameter]))
    return None


def _whole_to(name: str, layout: Layout, load: list[int]) -> int:
    """Random states to their rank, where there is one; the rest to the rank that has least."""
    found = RANDOM_OF.match(name)
    if found:
        return int(found[1]) % layout.ranks
    return min(range(layout.ranks), key=load.__getitem__)


def _cut(
    shape: Shape, sharding: Sharding, layout: Layout, stage: int, load: Callable[[int], int]
) -> Iterator[tuple[int, Box]]:
    part = _part_shape(shape, sharding, layout)
    holders: dict[Placement, list[int]] = {}
    for rank in range(layout.ranks):
        holders.setdefault(sharding.placement(part, layout, rank), []).append(rank)
    total = math.prod(part)
    for placement, ranks in holders.items():
        owners = ranks if stage else [min(ranks, key=load)]
        each = -(-total // len(owners))
        for place, rank in enumerate(owners):
            for box in boxes_of_range(part, place * each, min((place + 1) * each, total)):
                for logical, _ in placement.parts(box):
                    yield rank, logical


def _part_shape(shape: Shape, sharding: Sharding, layout: Layout) -> Shape:
    part = list(shape)
    for _, dim, _, count in _cuts(sharding, layout):
        part[dim] //= count
    return tuple(part)


def _cuts(sharding: Sharding, layout: Layout) -> Iterator[tuple[str, int, int, int]]:
    """(option of the tool, dimension, blocks in it, in how many parts each is cut)."""
    if sharding.tensor is not None:
        yield "tensor", *sharding.tensor, layout.tensor
    if sharding.expert:
        yield "expert", 0, 1, layout.expert
    if sharding.slices is not None:
        yield "expert-tensor", *sharding.slices, layout.expert_tensor


def _check_ranks(layout: Layout) -> None:
    sizes = {"ranks": layout.ranks, "tensor": layout.tensor, "expert": layout.expert}
    for option, size in {**sizes, "expert-tensor": layout.expert_tensor}.items():
        if not 1 <= size <= MOST_RANKS:
            raise UserError(f"--{option}: {size} is not between 1 and {MOST_RANKS}")
    if layout.ranks % layout.tensor:
        raise UserError(f"--tensor: {layout.tensor} does not divide --ranks {layout.ranks}; choose a divisor")
    if layout.ranks % layout.expert_ranks:
        raise UserError(
            f"--expert x --expert-tensor: {layout.expert} x {layout.expert_tensor} does not divide "
            f"--ranks {layout.ranks}; choose divisors"
        )


def _check_parts(saved: Saved, layout: Layout) -> None:
    """No more ranks than there is something to deal to."""
    parameters, tensors = count_parameters(saved)["total"], len(saved.index["tensors"])
    if layout.ranks > parameters:
        raise UserError(
            f"--ranks: {layout.ranks} are more than the checkpoint's {parameters} parameters; choose at most "
            f"{parameters}"
        )
    if layout.ranks * tensors > MOST_PARTS:
        raise UserError(
            f"--ranks: {layout.ranks} would cut the checkpoint's {tensors} tensors into more than "
            f"{MOST_PARTS:,} parts; choose at most {MOST_PARTS // tensors} (as it is, a checkpoint "
            "loads at any number of ranks)"
        )


def _check_divisions(saved: Saved, layout: Layout) -> None:
    """The layout against the weights, and the index's cuts against them."""
    for section, key in TENSOR_DIVIDES:
        keys = saved.meta["config"].get(section)
        size = keys.get(key) if isinstance(keys, dict) else None
        if isinstance(size, int) and size % layout.tensor:
            raise UserError(
                f"--tensor: {layout.tensor} does not divide {section}.{key} {size}; choose a divisor"
            )
    shardings = {name: Sharding.from_json(dict(it)) for name, it in saved.index["shardings"].items()}
    if layout.expert_ranks > 1 and not any(it.expert for it in shardings.values()):
        raise UserError("--expert, --expert-tensor: the checkpoint is of a dense model; leave them at 1")
    for name in saved.names():
        sharding = _sharding(saved, name)
        if sharding is not None:
            _check_cuts(saved, name, sharding, layout)


def _check_cuts(saved: Saved, name: str, sharding: Sharding, layout: Layout) -> None:
    shape = saved.shape(name)
    for option, dim, blocks, count in _cuts(sharding, layout):
        if dim >= len(shape) or shape[dim] % blocks:
            raise UserError(f"{saved.path / INDEX}: {name} of shape {shape} has no cut {dim}, {blocks}")
        if shape[dim] // blocks % count:
            raise UserError(
                f"--{option}: {count} does not divide the {shape[dim] // blocks} rows that it cuts of {name} "
                f"{shape}; choose a divisor"
            )
