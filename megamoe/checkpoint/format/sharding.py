"""How layouts cut a weight, as a checkpoint's index says it; to read that takes no DeepSpeed."""

from dataclasses import dataclass
from typing import Any

from megamoe.checkpoint.format.boxes import Cut, Placement
from megamoe.parallel.layout import Layout


@dataclass(frozen=True)
class Sharding:
    """How a parameter may be cut, whatever the layout: the dimension and its blocks, by kind of parallelism.

    tensor: of a dense weight; expert: of stacked experts, their first dimension; slices: of an expert's FFN.
    """

    tensor: tuple[int, int] | None = None
    expert: bool = False
    slices: tuple[int, int] | None = None

    def placement(self, shape: tuple[int, ...], ranks: Layout, rank: int) -> Placement:
        """Of the part, of that shape, which the rank holds."""
        cuts = []
        if self.tensor is not None and ranks.tensor > 1:
            dim, stride = self.tensor
            cuts.append(Cut(dim, ranks.tensor_rank(rank), ranks.tensor, stride))
        if self.expert and ranks.expert > 1:
            cuts.append(Cut(0, ranks.expert_rank(rank), ranks.expert))
        if self.slices is not None and ranks.expert_tensor > 1:
            dim, stride = self.slices
            cuts.append(Cut(dim, rank % ranks.expert_tensor, ranks.expert_tensor, stride))
        return Placement(shape, tuple(cuts))

    def to_json(self) -> dict[str, Any]:
        """Plain data, of what is set."""
        return {name: value for name, value in vars(self).items() if value}
