"""Which rank writes which chunk, planned by torch.distributed.checkpoint."""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megamoe.errors import UserError
from megamoe.parallel.chunks import LocalChunk, Shape

ChunkId = tuple[str, Shape]  # the tensor's name and the chunk's offsets


@dataclass(frozen=True)
class Plan:
    """The plan of a save.

    own: the chunks that this rank writes. tensors: those of index.json; empty but on the first rank.
    """

    own: frozenset[ChunkId]
    tensors: dict[str, Any]


def chunk_id(local: LocalChunk) -> ChunkId:
    """Return what identifies a chunk in a plan."""
    return local.name, local.chunk.offsets


def fingerprint(local_chunks: list[LocalChunk]) -> int:
    """Return a hash of everything that a plan depends on. While it is equal, a plan can be used again."""
    return hash(
        tuple((local.name, local.global_shape, local.chunk, local.tensor.dtype) for local in local_chunks)
    )


def plan_save(local_chunks: list[LocalChunk]) -> Plan:
    """Plan which rank writes which of the chunks of all ranks. Collective.

    Raises:
        UserError: on the first rank, if chunks overlap or do not fill their tensors.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    local_plan = SavePlan([_item(local) for local in local_chunks])
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(local_plan, gathered)
    plans: list[Any] = [None] * size
    problem = None
    if gathered is not None:
        try:
            plans, _ = planner.create_global_plan(gathered)
        except ValueError as error:  # raised later: the other ranks wait for the scatter
            problem = error
    received: list[Any] = [None]
    dist.scatter_object_list(received, plans if rank == 0 else None)
    if problem is not None:
        first = re.split("; |: Chunk", str(problem).removeprefix("Failed to validate global plan: "))[0]
        raise UserError(
            f"what the ranks hold at this layout does not make a checkpoint ({first}), which is an error of "
            "megamoe: train at another layout (`parallel`) or at ZeRO stage 0"
        )
    items = received[0].items if received[0] is not None else []
    tensors = _index(plans) if rank == 0 else {}
    return Plan(frozenset((item.index.fqn, tuple(item.index.offset or ())) for item in items), tensors)


def _item(local: LocalChunk) -> WriteItem:
    offsets, sizes = torch.Size(local.chunk.offsets), torch.Size(local.chunk.sizes)
    return WriteItem(
        index=MetadataIndex(local.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(dtype=local.tensor.dtype),
            size=torch.Size(local.global_shape),
        ),
    )


def _index(plans: list[SavePlan]) -> dict[str, Any]:
    """Return `tensors` of index.json (`meta.TensorMeta` by name) for the plans of all ranks."""
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            dtype, shape = str(data.properties.dtype).removeprefix("torch."), list(data.size)
            tensor = tensors.setdefault(item.index.fqn, {"dtype": dtype, "shape": shape, "chunks": []})
            tensor["chunks"].append([rank, list(data.chunk.offsets), list(data.chunk.sizes)])
    return dict(sorted(tensors.items()))
