"""How parameters are sharded, and which rank writes which chunk, planned by torch.distributed.checkpoint."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megamoe.checkpoint.format.chunks import LocalChunk, Placement, Shape, Sharding
from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.moe.experts.activations import num_halves
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.parallel.layout import Layout


def shardings(model: nn.Module) -> dict[str, Sharding]:
    """Return how every parameter is sharded, by name."""
    slices, gated = dict(_slices(model)), _gated(model)
    return {
        name: _sharding(parameter, slices.get(name), 2 if name.startswith(gated) else 1)
        for name, parameter in model.named_parameters()
    }


def placements(model: nn.Module, layout: Layout, rank: int) -> dict[str, Placement]:
    """Return where every parameter of the rank lies in the global one, by name.

    ZeRO's sharding is left out.
    """
    found = shardings(model)
    return {
        name: found[name].placement(whole_shape(parameter), layout, rank)
        for name, parameter in model.named_parameters()
    }


def _sharding(parameter: Tensor, slices: tuple[int, int] | None, stride: int) -> Sharding:
    if is_moe_param(parameter):
        return Sharding(expert=True, slices=slices)
    if getattr(parameter, "tensor_model_parallel", False):
        return Sharding(tensor=(parameter.partition_dim, stride))  # type: ignore[attr-defined]
    return Sharding()


def _gated(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of dense weights that hold a gate and a value, one after the other.

    Megatron-Core's `partition_stride` cannot be used: it is 1 in the layers over Transformer Engine.
    """
    return tuple(
        f"{name}.linear_fc1."
        for name, module in model.named_modules()
        if hasattr(module, "linear_fc1") and module.config.gated_linear_unit
    )


def _slices(model: nn.Module) -> list[tuple[str, tuple[int, int]]]:
    """Return (dimension, blocks) of each expert weight that expert tensor parallelism shards, by name."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            halves = num_halves(module.activation)
            found += [(f"{name}.up", (1, halves)), (f"{name}.down", (2, 1))]
            found += [(f"{name}.up_bias", (1, halves)), (f"{name}.down_bias", (1, 1))]
    return found


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
        ValueError: on the first rank, if chunks overlap or do not fill their tensors.
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
        raise problem
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
