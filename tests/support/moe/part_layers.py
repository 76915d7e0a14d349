"""A layer for every registered part, with parts that fit it: those of the first preset that contains it."""

import copy
from typing import Any

from megamoe import registry
from megamoe.config import parse_config
from megamoe.config.parts import DEFAULTS
from megamoe.errors import UserError
from megamoe.moe.validation import check_parts
from tests.support.moe.examples import example_trees, examples_of

NUM_EXPERTS = 16
PARTS = [(kind, name) for kind in registry.LAYER_KINDS for name in registry.list_parts(kind)]
PART_IDS = [f"{kind}-{name}" for kind, name in PARTS]


def moe_tree(kind: str, name: str, num_experts: int = NUM_EXPERTS) -> dict[str, Any]:
    """Return the section `moe` of a layer with this part."""
    own = _options(kind, name)
    for preset in registry.list_presets().values():
        if not _has(preset.tree, kind, name):
            continue
        tree = {**_sized(preset.tree), "num_experts": num_experts}
        if kind == "score_function":  # with a bias, which not every selector follows
            tree["router"][kind] = {"name": name, **own}
        try:
            check_parts(parse_config({"moe": tree}).moe, expert_parallel=1)
        except UserError:
            continue
        return tree
    return example_trees(kind, name, num_experts)[-1]


def _sized(preset: dict[str, Any]) -> dict[str, Any]:
    """Return a preset with small sizes and fixed numbers of groups, independent of the ranks."""
    tree = copy.deepcopy(preset)
    router = tree["router"]
    for kind in registry.STAGES:
        router[kind] = _with_options(kind, router.get(kind, DEFAULTS[kind]))
    router["masks"] = [_with_options("mask", choice) for choice in router.get("masks", [])]
    tree["losses"] = {
        loss: {**(options if isinstance(options, dict) else {"weight": options}), **_options("loss", loss, 0)}
        for loss, options in tree.get("losses", {}).items()
    }
    return tree


def _has(tree: dict[str, Any], kind: str, name: str) -> bool:
    if kind == "loss":
        return name in tree.get("losses", {})
    choices = tree["router"].get("masks", []) if kind == "mask" else [tree["router"].get(kind)]
    return name in [choice["name"] if isinstance(choice, dict) else choice for choice in choices]


def _with_options(kind: str, choice: Any) -> dict[str, Any]:
    """Return the choice with a part's example options; a selector's and a score function's from the preset
    stay.
    """
    options = choice if isinstance(choice, dict) else {"name": choice}
    own = {} if kind == "score_function" else _options(kind, options["name"])
    return {**own, **options} if kind == "selector" else {**options, **own}


def _options(kind: str, name: str, number: int = -1) -> dict[str, Any]:
    """Return the options of one of the part's examples: the last shows most of it, the first fits every
    preset.
    """
    return examples_of(kind, name, NUM_EXPERTS, 2)[number].options
