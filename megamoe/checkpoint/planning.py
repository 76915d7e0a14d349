"""Who writes which box: torch.distributed.checkpoint's planner over the pieces of all ranks.

Boxes that several ranks hold (replicas) are dealt out, so that each is written once and the ranks write
about as much as each other.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megamoe.checkpoint.format.boxes import Piece, Shape

Place = tuple[str, Shape]  # a box by its tensor's name and offsets


@dataclass(frozen=True)
class Plan:
    """mine: the boxes that this rank writes. tensors: on the first rank, the index of all of them."""

    mine: frozenset[Place]
    tensors: dict[str, Any]


def place_of(piece: Piece) -> Place:
    """By which plans know a piece."""
    return piece.name, piece.box.offsets


def fingerprint(pieces: list[Piece]) -> int:
    """Equal where a plan can be used again."""
    return hash(tuple((piece.name, piece.shape, piece.box, piece.tensor.dtype) for piece in pieces))


def agree_on_plan(pieces: list[Piece]) -> Plan:
    """Deal out the pieces of all ranks; collective.

    Raises:
        ValueError: on the first rank, if boxes overlap or do not fill their tensors.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    local = SavePlan([_item(piece) for piece in pieces])
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(local, gathered)
    plans: list[Any] = [None] * size
    problem = None
    if gathered is not None:
        try:
            plans, _ = planner.create_global_plan(gathered)
        except ValueError as error:  # the other ranks wait for theirs
            problem = error
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans if rank == 0 else None)
    if problem is not None:
        raise problem
    items = mine[0].items if mine[0] is not None else []
    tensors = _index(plans) if rank == 0 else {}
    return Plan(frozenset((item.index.fqn, tuple(item.index.offset or ())) for item in items), tensors)


def _item(piece: Piece) -> WriteItem:
    offsets, sizes = torch.Size(piece.box.offsets), torch.Size(piece.box.sizes)
    return WriteItem(
        index=MetadataIndex(piece.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.shape),
        ),
    )


def _index(plans: list[SavePlan]) -> dict[str, Any]:
    """Of what each rank writes: name -> `meta.TensorMeta`."""
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            tensor = tensors.setdefault(
                item.index.fqn,
                {
                    "dtype": str(data.properties.dtype).removeprefix("torch."),
                    "shape": list(data.size),
                    "chunks": [],
                },
            )
            tensor["chunks"].append([rank, list(data.chunk.offsets), list(data.chunk.sizes)])
    return dict(sorted(tensors.items()))
