"""Which box of each weight a rank holds, read from the marks that the rooms below leave on the parameters."""

from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from megamoe.checkpoint.format.boxes import Placement
from megamoe.checkpoint.format.sharding import Sharding
from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.moe.experts.activations import num_halves
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.parallel.layout import Layout


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
            found += [(f"{name}.up", (1, num_halves(module.activation))), (f"{name}.down", (2, 1))]
    return found
