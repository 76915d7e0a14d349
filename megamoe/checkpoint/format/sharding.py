"""How a parameter is sharded, as `shardings` of a checkpoint's index says it. It needs no DeepSpeed."""

from dataclasses import dataclass
from typing import Any

from megamoe.checkpoint.format.chunks import DimShard, Placement
from megamoe.parallel.layout import Layout


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
        dim_shards = []
        if self.tensor is not None and layout.tensor > 1:
            dim, stride = self.tensor
            dim_shards.append(DimShard(dim, layout.tensor_rank(rank), layout.tensor, stride))
        if self.expert and layout.expert > 1:
            dim_shards.append(DimShard(0, layout.expert_rank(rank), layout.expert))
        if self.slices is not None and layout.expert_tensor > 1:
            dim, stride = self.slices
            dim_shards.append(DimShard(dim, rank % layout.expert_tensor, layout.expert_tensor, stride))
        return Placement(shape, tuple(dim_shards))

    def to_json(self) -> dict[str, Any]:
        """Return the attributes that are set, as plain data."""
        return {name: value for name, value in vars(self).items() if value}
