"""Which box of each weight a rank holds, read from the marks that the rooms below leave on the parameters."""

from dataclasses import dataclass
from typing import Any

from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.parallel.checkpoints.boxes import Cut, Placement
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

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Sharding":
        """Of `to_json`, checked by whoever read it."""
        pairs = {name: tuple(content[name]) for name in ("tensor", "slices") if name in content}
        return cls(**pairs, expert=bool(content.get("expert")))


def shardings(model: nn.Module) -> dict[str, Sharding]:
    """Of every parameter, by name."""
    slices, gated = dict(_slices(model)), _gated(model)
    return {
        name: _sharding(parameter, slices.get(name), 2 if name.startswith(gated) else 1)
        for name, parameter in model.named_parameters()
    }


def placements(model: nn.Module, ranks: Layout, rank: int) -> dict[str, Placement]:
    """Of every parameter, by name; ZeRO's cuts are not among them."""
    cuts = shardings(model)
    return {
        name: cuts[name].placement(whole_shape(parameter), ranks, rank)
        for name, parameter in model.named_parameters()
    }


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Of the parameter, though ZeRO 3 may have emptied it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _sharding(parameter: Tensor, slices: tuple[int, int] | None, stride: int) -> Sharding:
    if is_moe_param(parameter):
        return Sharding(expert=True, slices=slices)
    if getattr(parameter, "tensor_model_parallel", False):
        return Sharding(tensor=(parameter.partition_dim, stride))  # type: ignore[attr-defined]
    return Sharding()


def _gated(model: nn.Module) -> tuple[str, ...]:
    """Beginnings of the names of dense weights that hold a gate and a value, one after the other.

    Not by Megatron-Core's `partition_stride`: its layers of Transformer Engine say 1.
    """
    return tuple(
        f"{name}.linear_fc1."
        for name, module in model.named_modules()
        if hasattr(module, "linear_fc1") and module.config.gated_linear_unit
    )


def _slices(model: nn.Module) -> list[tuple[str, tuple[int, int]]]:
    found = []
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            halves = 2 if module.activation == "swiglu" else 1
            found += [(f"{name}.up", (1, halves)), (f"{name}.down", (2, 1))]
    return found
