"""Checks of `moe.groups`, and the checks of a layer under the keys of its group."""

import re
from collections.abc import Callable, Iterator

from megamoe.config.layer_kinds import LayerKind, chosen_blocks, kinds, layers_in
from megamoe.config.schema import GroupLayersConfig, GroupStackConfig, RunConfig
from megamoe.config.shapes import Stack, moe_layer_numbers, stacks
from megamoe.errors import Problem

OF_A_LAYER = re.compile(r"\bmoe\.(?!layers|groups|router\.replay)(?=[a-z])")  # the start of a key in a text


def of_each_kind(config: RunConfig, check: Callable[[RunConfig], Iterator[Problem]]) -> Iterator[Problem]:
    """Yield the problems that a check of one kind of MoE layers finds, under the keys of its group; each
    once.

    check: takes the configuration of the kind, whose `moe` is that of its layers alone.
    """
    seen = set()
    for kind in kinds(config):
        for problem in check(kind.config):
            problem = Problem(named(kind, problem.key), named(kind, problem.message))
            if problem not in seen:
                yield problem
            seen.add(problem)


def named(kind: LayerKind, text: str) -> str:
    """Return a text in which the keys of `moe` are those of the kind's group."""
    return text if kind.key == "moe" else OF_A_LAYER.sub(f"{kind.key}.", text)


def group_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield groups without layers, layers that do not exist, and layers that are named twice."""
    groups, two = config.moe.groups, config.model.architecture == "encoder_decoder"
    if groups and not moe_layer_numbers(config):
        yield Problem("moe.groups", "found groups, but no block is MoE (moe.layers); leave them out")
        return
    owners: dict[tuple[str, int], str] = {}
    for number, group in enumerate(groups):
        key = f"moe.groups[{number}].layers"
        yield from _stack_problems(group.layers, key, config)
        by_stack, has_layer = layers_in(group.layers, config), False
        for stack in stacks(config):
            where = f"{key}.{stack.name}" if two else key
            for block in chosen_blocks(by_stack[stack.name], stack) if stack.name in by_stack else ():
                has_layer = True
                owner = owners.setdefault((stack.name, block), where)
                if owner != where or by_stack[stack.name].at.count(block) > 1:
                    yield Problem(where, f"block {block} is named twice, here and in {owner}; name it once")
                    break
            if stack.name in by_stack:
                yield from _layer_problems(by_stack[stack.name], stack, where)
        if not has_layer:
            yield Problem(key, "has no MoE layer; name some, or leave the group out")


def _stack_problems(layers: GroupLayersConfig, key: str, config: RunConfig) -> Iterator[Problem]:
    """Yield layers that are given for other stacks than the architecture has."""
    found, two = f"model.architecture {config.model.architecture}", len(layers_in(layers, config)) == 2
    if two and (layers.every or layers.at or layers.first or layers.last):
        yield Problem(
            key, f"{found} has two stacks; give the layers under encoder and decoder: {{decoder: first 2}}"
        )
    for name, value in (("encoder", layers.encoder), ("decoder", layers.decoder)):
        if value is not None and not two:
            yield Problem(f"{key}.{name}", f"{found} has one stack; give the layers directly under layers")


def _layer_problems(layers: GroupStackConfig, stack: Stack, key: str) -> Iterator[Problem]:
    """Yield blocks without an MoE layer, and more first or last layers than there are."""
    known = stack.moe_layers
    shown = ", ".join(map(str, known)) or "none"
    for block in layers.at:
        if block not in known:
            what = "does not exist" if block > stack.num_layers else "has no MoE layer"
            yield Problem(key, f"block {block} {what}; those with an MoE layer (moe.layers): {shown}")
            break
    for name in ("first", "last"):
        count = getattr(layers, name) or 0
        if count > len(known):
            yield Problem(key, f"{name} {count}, but there are {len(known)} MoE layers (moe.layers): {shown}")
