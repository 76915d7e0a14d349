"""How the layout shards each parameter of a model, and where a rank's part lies in the whole."""

from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.moe.experts.activations import num_halves
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.parallel.chunks import Placement, Sharding
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
