"""Example layers for every registered part, built from what the parts declare.

Tests and benchmarks run them, for plugins' parts too.
"""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from megamoe.config import PartChoice, parse_config
from megamoe.config.parts import DEFAULTS
from megamoe.config.schema import MoEConfig
from megamoe.errors import UserError
from megamoe.moe.capabilities import needs, provides, requirements
from megamoe.moe.part import Example
from megamoe.moe.suggestions import find_parts
from megamoe.moe.validation import check_parts, chosen_parts, provider, usable
from megamoe.registry import STAGES, get_part

MOST_NEIGHBOURS = 8

Tree = dict[str, Any]


def example_trees(
    kind: str, name: str, num_experts: int = 16, num_choices: int = 2, losses: Tree | None = None
) -> list[Tree]:
    """Return sections `moe` that contain this part, one for each of its `Part.examples`.

    The other stages are defaults, or parts that provide what is required. losses: further losses; those that
    do not fit the others are left out.

    Raises:
        UserError: if the parts that it finds do not fit together.
    """
    examples = get_part(kind, name).examples(num_experts, num_choices)
    return [_tree(kind, name, e, (num_experts, num_choices), losses or {}) for e in examples]


def _tree(kind: str, name: str, example: Example, sizes: tuple[int, int], losses: Tree) -> Tree:
    tree: Tree = {"num_experts": sizes[0], "router": {}, "losses": {}, **copy.deepcopy(example.beside)}
    for stage in STAGES:
        if stage not in tree["router"]:
            first: Example = get_part(stage, DEFAULTS[stage]).examples(*sizes)[0]
            _put(tree, stage, {"name": DEFAULTS[stage], **first.options})
    _put(tree, kind, {"name": name, **example.options})
    for _ in range(MOST_NEIGHBOURS):
        missing = _missing(parse_config({"moe": tree}).moe, sizes)
        found = [way for way in missing if way.kind != kind or kind not in STAGES]
        if not found:
            break
        _put(tree, found[0].kind, found[0].to_dict())
    check_parts(parse_config({"moe": tree}).moe, expert_parallel=1)
    for loss, options in losses.items():
        more = {**tree, "losses": {loss: options, **tree["losses"]}}
        tree = more if _makes_sense(more) else tree
    return tree


def _put(tree: Tree, kind: str, choice: Tree) -> None:
    if kind == "loss":
        tree["losses"][choice["name"]] = {key: value for key, value in choice.items() if key != "name"}
    elif kind == "mask":
        tree["router"]["masks"] = [choice]
    else:
        tree["router"][kind] = choice


def _missing(moe: MoEConfig, sizes: tuple[int, int]) -> Iterator[PartChoice]:
    """Return the parts that would provide what the layer's parts still require."""
    chosen = [choice for _, choice in chosen_parts(moe)]
    for choice in chosen:
        for word in requirements(choice):
            if provider(moe, word) is None:
                yield from usable(find_parts(partial(provides, word), sizes), moe)
        for kind, word in get_part(choice.kind, choice.name).must_be_required(choice.options):
            if not any(needs(word, kind, other) for other in chosen):
                yield from usable(find_parts(partial(needs, word, kind), sizes), moe)


def _makes_sense(tree: Tree) -> bool:
    try:
        check_parts(parse_config({"moe": tree}).moe, expert_parallel=1)
    except UserError:
        return False
    return True
