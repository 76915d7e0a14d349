"""Every registered part with neighbours among which it makes sense: those of the first preset that has it."""

import copy
from typing import Any

from megamoe import registry

NUM_EXPERTS = 16
BIAS_UPDATE = 0.01  # of a score function among its own company
PARTS = [(kind, name) for kind in registry.KINDS for name in registry.list_parts(kind)]
PART_IDS = [f"{kind}-{name}" for kind, name in PARTS]
# Small sizes, and choices that do not depend on how many ranks share the experts.
OPTIONS: dict[str, dict[str, Any]] = {
    "expert_dropout": {"cluster_size": 4},
    "clustering": {"cluster_size": 4},
    "group_limit": {"num_groups": 4, "keep": 2},
    "entropy_prune": {"num_groups": 4},
    "gating_dropout": {"rate": 0.5, "ranks": 4},
    "device": {"devices": 4, "factor": 0.5},
    "per_expert": {"factor": 0.75, "min_capacity": 0},
    "device_balance": {"num_groups": 4},
    "communication_balance": {"num_groups": 4, "keep": 2},
    "hierarchical": {"groups": 4},
    "expert_choice": {"allow_non_causal": True},
    "stable": {"phase_1_steps": 2},
    "linear": {"jitter": 0.1},
}


def moe_tree(kind: str, name: str, num_experts: int = NUM_EXPERTS) -> dict[str, Any]:
    """The section `moe` of a layer with this part."""
    trees = [preset.tree for preset in registry.list_presets().values() if _has(preset.tree, kind, name)]
    if kind == "score_function":  # with a bias, which not every selector follows
        trees = [tree for tree in trees if _has(tree, "selector", "top_k")]
    tree = copy.deepcopy(trees[0]) if trees else {"router": {}, "losses": {}}
    if not trees:
        _put(tree, kind, name)
    router = tree["router"]
    for stage in ("scorer", "score_function", "selector", "capacity"):
        if stage in router:
            router[stage] = _sized(router[stage])
    if kind == "score_function":
        router["score_function"]["bias_update"] = BIAS_UPDATE
    router["masks"] = [_sized(choice) for choice in router.get("masks", [])]
    tree["losses"] = {
        loss: {**(options if isinstance(options, dict) else {"weight": options}), **OPTIONS.get(loss, {})}
        for loss, options in tree.get("losses", {}).items()
    }
    return {**tree, "num_experts": num_experts}


def _has(tree: dict[str, Any], kind: str, name: str) -> bool:
    if kind == "loss":
        return name in tree.get("losses", {})
    choices = tree["router"].get("masks", []) if kind == "mask" else [tree["router"].get(kind)]
    return name in [choice["name"] if isinstance(choice, dict) else choice for choice in choices]


def _put(tree: dict[str, Any], kind: str, name: str) -> None:
    if kind == "loss":
        tree["losses"][name] = {"weight": 0.1}
    elif kind == "mask":
        tree["router"]["masks"] = [name]
    else:
        tree["router"][kind] = name


def _sized(choice: Any) -> dict[str, Any]:
    options = choice if isinstance(choice, dict) else {"name": choice}
    return {**options, **OPTIONS.get(options["name"], {})}
