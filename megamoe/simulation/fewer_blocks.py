"""Extrapolates the costs of a deep model from models of fewer blocks, as blocks of one kind cost the same."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from megamoe.config import RunConfig
from megamoe.config.schema import LayersConfig
from megamoe.config.shapes import stacks, window_of
from megamoe.simulation.figures import Figures, combined

Kind = tuple[bool, bool, int | None]  # an MoE layer as FFN, one inserted behind, the window of attention
SIMULATED = 1  # blocks of each kind


def kinds(config: RunConfig) -> list[Kind]:
    """Return the kind of each block of a decoder, in order."""
    stack = stacks(config)[0]
    moe, inserted = set(stack.moe_blocks), set(stack.layers.insert_after)
    return [
        (block in moe, block in inserted, window_of(config.model, block))
        for block in range(1, stack.num_layers + 1)
    ]


def with_blocks(config: RunConfig, blocks: list[int]) -> RunConfig:
    """Return the model of some of its blocks, counted from 0, in their order."""
    chosen = [kinds(config)[block] for block in blocks]
    changed = copy.deepcopy(config)
    changed.model.num_layers = len(blocks)
    changed.moe.layers = LayersConfig(
        at=[number for number, kind in enumerate(chosen, 1) if kind[0]],
        insert_after=[number for number, kind in enumerate(chosen, 1) if kind[1]],
    )
    if config.model.attention.window is not None:
        windows = [number for number, kind in enumerate(chosen, 1) if kind[2] is not None]
        changed.model.attention.window_blocks = windows
        changed.model.attention.window = config.model.attention.window if windows else None
        if not windows:
            changed.model.attention.window_blocks = None
    return changed


def fewer_blocks(config: RunConfig) -> list[tuple[int, list[int]]]:
    """Return sets of blocks whose costs, each times its factor, sum to the costs of all.

    The first set has one block of each kind, and the others one more of a kind. The last block is in all.
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


def extrapolated(config: RunConfig, simulate: Callable[[RunConfig], Figures]) -> tuple[Figures, list[int]]:
    """Return the figures of the whole model, and the numbers of blocks of the models that were simulated."""
    terms = fewer_blocks(config)
    found = [(factor, simulate(with_blocks(config, blocks))) for factor, blocks in terms]
    whole = combined(found)
    # The moments of the peaks may differ a little between the models.
    peaks = {key: max(0.0, size) for key, size in whole.peaks.items()}
    kept = {key: max(0.0, size) for key, size in whole.kept.items()}
    return replace(whole, peaks=peaks, kept=kept), [len(blocks) for _, blocks in terms]
