"""Layers that differ (`moe.groups`): which layers a group has, and the configuration of each layer."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megamoe.config.schema import (
    GroupLayersConfig,
    GroupStackConfig,
    LayersConfig,
    MoEConfig,
    MoELayerConfig,
    RunConfig,
    StackLayersConfig,
)
from megamoe.config.shapes import Stack, moe_layer_numbers, routed_experts, stacks
from megamoe.registry import get_part

KEYS = [field.name for field in fields(MoELayerConfig)]  # of a group, but its layers


@dataclass(frozen=True)
class LayerKind:
    """The MoE layers of a model that have one configuration: those of a group, or those that no group has.

    key: the section of that configuration, `moe` or `moe.groups[0]`. config: the run's, whose `moe` is that
    of these layers and has their positions alone, so that functions of a configuration answer for them.
    layers: their block numbers, see `moe_layer_numbers`.
    """

    key: str
    config: RunConfig
    layers: list[int]

    @property
    def moe(self) -> MoEConfig:
        """The section `moe` of these layers."""
        return self.config.moe

    def place(self, key: str) -> str:
        """Return where a key of `moe`, such as `moe.router.selector`, stands for these layers."""
        inside = key == "moe" or key.startswith("moe.")
        return f"{self.key}{key.removeprefix('moe')}" if inside else key

    @property
    def name(self) -> str:
        """What a table calls these layers: their blocks, such as `1 to 3, 8`."""
        return ranges(self.layers)


def kinds(config: RunConfig) -> list[LayerKind]:
    """Return the kinds of MoE layers; without `moe.groups` there is one, of all layers, even of none.

    Otherwise those that no group has come first, if there are any, and then the groups in their order.
    """
    groups = config.moe.groups
    if not groups:
        return [LayerKind("moe", config, moe_layer_numbers(config))]
    chosen = [_places(group.layers, config) for group in groups]
    taken: dict[str, set[int]] = {}
    for places in chosen:
        for stack, blocks in places.items():
            taken[stack] = taken.get(stack, set()) | blocks
    rest = {s.name: set(s.moe_layers) - taken.get(s.name, set()) for s in _own_stacks(config)}
    router = config.moe.router
    found = []
    if any(rest.values()):
        found.append(_kind("moe", config, replace(config.moe, groups=[]), rest))
    for number, (group, places) in enumerate(zip(groups, chosen, strict=True)):
        options = {key: getattr(group, key) for key in KEYS}
        options["router"] = replace(group.router, replay=router.replay)  # a record is of the whole model
        moe = MoEConfig(**options, layers=config.moe.layers)
        found.append(_kind(f"moe.groups[{number}]", config, moe, places))
    return found


def group_layers(config: RunConfig) -> list[list[int]]:
    """Return the block numbers of the layers of each group, in the order of `moe.groups`."""
    return [kind.layers for kind in kinds(config) if kind.key != "moe"]


def config_by_layer(config: RunConfig) -> dict[int, RunConfig]:
    """Return the configuration of each MoE layer by its block number, see `LayerKind.config`."""
    return {number: kind.config for kind in kinds(config) for number in kind.layers}


def with_weights_of_layer(moe: MoEConfig, num_layers: int) -> MoEConfig:
    """Return the section of a layer, with the weights of losses of which the mean over the layers counts
    divided by their number.
    """
    losses = dict(moe.losses)
    for name, choice in losses.items():
        if getattr(choice.options, "over_layers", "sum") == "mean":
            options = replace(choice.options, weight=choice.options.weight / num_layers)
            losses[name] = replace(choice, options=options)
    return replace(moe, losses=losses)


def scores_before(config: RunConfig) -> dict[int, int]:
    """Return which MoE layer's scores each one's residual reads, by their block numbers.

    It is the last one before it in its stack whose residual reads scores too and whose router chooses among
    as many experts; a layer without one is missing. Multi-token prediction follows the decoder's last block.
    """

    starts = {stack.first for stack in _own_stacks(config)}
    latest: dict[tuple[int, int], int] = {}  # by the stack's first block and the number of experts
    found: dict[int, int] = {}
    for number, own in sorted(config_by_layer(config).items()):
        key = max(start for start in starts if start <= number), routed_experts(own.moe)
        if not get_part("residual", own.moe.router.residual.name).reads_before:
            continue
        if key in latest:
            found[number] = latest[key]
        latest[key] = number
    return found


def experts_by_layer(config: RunConfig) -> list[int]:
    """Return the number of experts that compute in each MoE layer, in the order of their block numbers."""
    found = config_by_layer(config)
    return [found[number].moe.num_experts for number in sorted(found)]


def routed_by_layer(config: RunConfig) -> list[int]:
    """Return the number of experts that the router of each MoE layer chooses among, in the same order."""
    found = config_by_layer(config)
    return [routed_experts(found[number].moe) for number in sorted(found)]


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, such as `1 to 3, 8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [(str(run[0]), str(run[-1]), len(run)) for run in runs]
    return ", ".join(
        first if count == 1 else f"{first}{' to ' if count > 2 else ', '}{last}"
        for first, last, count in shown
    )


def chosen_blocks(layers: GroupStackConfig, stack: Stack) -> Iterator[int]:
    """Yield the blocks of a stack that a group names, counted from 1; a block named twice comes twice.

    `at` may name blocks without an MoE layer, which `validation` refuses.
    """
    known = stack.moe_layers
    yield from layers.at
    yield from (block for block in known if layers.every and block % layers.every == 0)
    yield from known[: layers.first or 0]
    yield from known[len(known) - min(layers.last or 0, len(known)) :]


def layers_in(layers: GroupLayersConfig, config: RunConfig) -> dict[str, GroupStackConfig]:
    """Return what a group says of each stack of blocks, by the stack's name."""
    if config.model.architecture != "encoder_decoder":
        return {config.model.architecture: layers}
    both = {"encoder": layers.encoder, "decoder": layers.decoder}
    return {name: value or GroupStackConfig() for name, value in both.items()}


def _own_stacks(config: RunConfig) -> list[Stack]:
    """Return the stacks without that of multi-token prediction, which follows the decoder's last block."""
    return [stack for stack in stacks(config) if stack.name != "prediction"]


def _places(layers: GroupLayersConfig, config: RunConfig) -> dict[str, set[int]]:
    """Return the MoE layers that a group has in each stack, by their blocks in it."""
    by_stack = layers_in(layers, config)
    return {
        stack.name: {*chosen_blocks(by_stack[stack.name], stack)} & {*stack.moe_layers}
        for stack in _own_stacks(config)
    }


def _kind(key: str, config: RunConfig, moe: MoEConfig, places: dict[str, set[int]]) -> LayerKind:
    by_stack = {}
    for stack in _own_stacks(config):
        own = places[stack.name]
        by_stack[stack.name] = StackLayersConfig(
            at=sorted(own & {*stack.moe_blocks}), insert_after=sorted(own & {*stack.layers.insert_after})
        )
    if config.model.architecture == "encoder_decoder":
        layers = LayersConfig(encoder=by_stack["encoder"], decoder=by_stack["decoder"])
    else:
        (only,) = by_stack.values()
        layers = LayersConfig(at=only.at, insert_after=only.insert_after)
    own_config = replace(config, moe=replace(moe, layers=layers))
    return LayerKind(key, own_config, moe_layer_numbers(own_config))
