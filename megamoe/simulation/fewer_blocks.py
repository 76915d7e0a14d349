"""Extrapolates the costs of a deep model from models of fewer blocks, as blocks of one kind cost the same."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megamoe.config import RunConfig
from megamoe.config.schema import LayersConfig, StackLayersConfig
from megamoe.config.shapes import stacks, window_of
from megamoe.simulation.figures import Figures, combined

SIMULATED = 1  # blocks of each kind
PREDICTION = "prediction"  # the stack whose blocks are always simulated all


class Kind(NamedTuple):
    """What the costs of a block depend on.

    stack: its name. moe: its FFN is an MoE layer. inserted: an MoE layer is behind it. window: of attention.
    """

    stack: str
    moe: bool
    inserted: bool
    window: int | None


def kinds(config: RunConfig) -> list[Kind]:
    """Return the kind of each block, an encoder's first; without those of multi-token prediction."""
    return [
        Kind(
            stack.name,
            block in stack.moe_blocks,
            block in stack.layers.insert_after,
            window_of(config.model, block),
        )
        for stack in stacks(config)
        if stack.name != PREDICTION
        for block in range(1, stack.num_layers + 1)
    ]


def with_blocks(config: RunConfig, blocks: list[int]) -> RunConfig:
    """Return the model of some of its blocks, counted from 0 through all stacks, in their order.

    blocks: at least one of each stack.
    """
    all_kinds = kinds(config)
    chosen: dict[str, list[Kind]] = {}
    for block in blocks:
        chosen.setdefault(all_kinds[block].stack, []).append(all_kinds[block])
    changed = copy.deepcopy(config)
    if config.model.architecture == "encoder_decoder":
        changed.model.encoder_layers = len(chosen["encoder"])
        changed.model.num_layers = len(chosen["decoder"])
        positions = {name: _positions(of_stack) for name, of_stack in chosen.items()}
        changed.moe.layers = LayersConfig(encoder=positions["encoder"], decoder=positions["decoder"])
        return changed
    [of_stack] = chosen.values()
    changed.model.num_layers = len(of_stack)
    layers = _positions(of_stack)
    changed.moe.layers = LayersConfig(at=layers.at, insert_after=layers.insert_after)
    if config.model.attention.window is not None:
        windows = [number for number, kind in enumerate(of_stack, 1) if kind.window is not None]
        changed.model.attention.window_blocks = windows or None
        changed.model.attention.window = config.model.attention.window if windows else None
    return changed


def _positions(blocks: list[Kind]) -> StackLayersConfig:
    """Return the positions of the MoE layers in a stack of these blocks."""
    return StackLayersConfig(
        at=[number for number, kind in enumerate(blocks, 1) if kind.moe],
        insert_after=[number for number, kind in enumerate(blocks, 1) if kind.inserted],
    )


def fewer_blocks(config: RunConfig) -> list[tuple[int, list[int]]]:
    """Return sets of blocks whose costs, each times its factor, sum to the costs of all.

    The first set has one block of each kind, and the others one more of a kind. The last block of each stack
    is in all.
    """
    all_kinds = kinds(config)
    places: dict[Kind, list[int]] = {}
    for block, kind in reversed(list(enumerate(all_kinds))):
        places.setdefault(kind, []).append(block)
    counts = Counter(all_kinds)
    base = [block for of_kind in places.values() for block in of_kind[:SIMULATED]]
    terms: list[tuple[int, list[int]]] = []
    further = 0
    for kind, of_kind in places.items():
        missing = counts[kind] - SIMULATED
        if missing > 0:
            further += missing
            terms.append((missing, sorted([*base, of_kind[SIMULATED]])))
    return [(1 - further, sorted(base)), *terms]


def is_worth_it(config: RunConfig) -> bool:
    """Whether the simulated sets have fewer blocks together than the model."""
    return sum(len(blocks) for _, blocks in fewer_blocks(config)) < len(kinds(config))


def extrapolated(config: RunConfig, simulate: Callable[[RunConfig], Figures]) -> tuple[Figures, list[int]]:
    """Return the figures of the whole model, and the numbers of blocks of the models that were simulated."""
    terms = fewer_blocks(config)
    found = [(factor, simulate(with_blocks(config, blocks))) for factor, blocks in terms]
    whole = combined(found)
    # The moments of the peaks may differ a little between the models.
    peaks = {key: max(0.0, size) for key, size in whole.peaks.items()}
    kept = {key: max(0.0, size) for key, size in whole.kept.items()}
    return replace(whole, peaks=peaks, kept=kept), [len(blocks) for _, blocks in terms]
