"""Example layers for every registered part: its options, and neighbours that provide what it requires."""

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from megamoe.config import PartChoice, parse_config
from megamoe.config.parts import DEFAULTS
from megamoe.config.schema import MoEConfig
from megamoe.moe.capabilities import needs, provides, requirements
from megamoe.moe.part import Example, Part
from megamoe.moe.validation import check_parts, chosen_parts, provider
from megamoe.registry import KINDS, STAGES, get_part, list_parts

MOST_NEIGHBOURS = 8
PRIORITIES = ("position", "choice_then_position", "probability", "choice_then_probability", "random")

Tree = dict[str, Any]


def beside(**router: Any) -> Tree:
    return {"router": router}


def groups(num_experts: int) -> int:
    return min(8, num_experts // 4)


def examples_of(kind: str, name: str, num_experts: int, num_choices: int) -> list[Example]:
    """Return the examples of a part in a layer of so many experts, a multiple of 16, and of about so many
    choices of a token, at least 2; of a plugin's part those of its `examples`, else its defaults.
    """
    make = EXAMPLES.get((kind, name)) or getattr(get_part(kind, name), "examples", None)
    return [Example()] if make is None else make(num_experts, num_choices)


def of_options(*several: Tree) -> Callable[[int, int], list[Example]]:
    return lambda e, k: [Example(options) for options in several]


BIASED = {"bias_update": 0.001}
EXAMPLES: dict[tuple[str, str], Callable[[int, int], list[Example]]] = {
    ("scorer", "dense_to_sparse"): of_options({"steps": 4}, {"noise": 0.0}),
    ("scorer", "hierarchical"): of_options({"noisy": True}),
    ("scorer", "linear"): of_options({}, {"jitter": 0.01}, {"bias": True}, {"rows": True}),
    ("scorer", "stable"): of_options({"phase_1_steps": 2}),
    ("scorer", "token_table"): lambda e, k: [
        Example({"table": table}, beside(selector={"name": "table", "k": k, "weights": "renormalised"}))
        for table in ("round_robin", "hash")
    ],
    ("mask", "entropy_prune"): lambda e, k: [Example({"num_groups": groups(e)})],
    ("mask", "expert_dropout"): lambda e, k: [Example({"cluster_size": groups(e)})],
    ("mask", "gating_dropout"): lambda e, k: [Example({"ranks": groups(e), "rate": 0.5})],
    ("mask", "group_limit"): lambda e, k: [
        Example({"num_groups": groups(e), "keep": min(3, groups(e) // 2)})
    ],
    ("score_function", "normalised_softmax"): of_options({"scale": 2.0}, {}, BIASED),
    ("score_function", "relu"): lambda e, k: [Example({}, beside(selector={"name": "above", "mean": k}))],
    ("score_function", "sigmoid"): of_options({}, BIASED),
    ("score_function", "softmax"): of_options({}, {"over": "all"}, BIASED),
    ("score_function", "sqrt_softplus"): of_options({}, BIASED),
    ("selector", "above"): lambda e, k: [
        Example({"mean": k}, beside(score_function="relu")),
        Example({"value": 1.5 / e, "at_least": 1}),
    ],
    ("selector", "entropy_aware"): lambda e, k: [Example({"max_k": max(k, 4)})],
    ("selector", "expert_choice"): lambda e, k: [Example({"k": k, "allow_non_causal": True})],
    ("selector", "hierarchical_top_k"): lambda e, k: [Example({"groups": 2, "k": max(k // 2, 2)})],
    ("selector", "sparse_mixer"): lambda e, k: [Example({"k": k, "epsilon": 0.5})],
    ("selector", "threshold"): lambda e, k: [
        Example({}, beside(score_function={"name": "softmax", "temperature": 0.1}))
    ],
    ("selector", "top_any"): lambda e, k: [Example({}, beside(score_function="sigmoid"))],
    ("capacity", "device"): of_options({"devices": 8}, {"devices": 4, "factor": 0.5}),
    ("capacity", "per_expert"): of_options(
        *({"priority": priority} for priority in PRIORITIES),
        {"factor": 0.75, "min_capacity": 0},
        {"pad": True},
    ),
    ("loss", "clustering"): lambda e, k: [Example({"cluster_size": groups(e)})],
    ("loss", "communication_balance"): lambda e, k: [
        Example({"num_groups": groups(e), "keep": min(3, groups(e) // 2)})
    ],
    ("loss", "device_balance"): lambda e, k: [Example({"num_groups": groups(e)})],
    ("loss", "drop_rate_balance"): lambda e, k: [
        Example({}, beside(capacity={"name": "per_expert", "factor": 1.0}))
    ],
    ("loss", "heterogeneous_balance"): lambda e, k: [
        Example({}, {"zero_experts": {"identity": 2, "zero": 1, "constant": 1}})
    ],
    ("loss", "relu_sparsity"): lambda e, k: [
        Example({"k": k, **more}, beside(score_function="relu", selector={"name": "above", "mean": k}))
        for more in ({}, {"balance": False})
    ],
    ("loss", "score_variance"): of_options({}, {"over": "all"}),
    ("loss", "switch_balance"): of_options(
        {}, {"scope": "sequence"}, {"scope": "global_batch", "running": True}
    ),
} | {
    ("selector", name): lambda e, k: [Example({"k": k})]
    for name in ("sample", "sinkhorn", "strictly_balanced", "table", "top_k")
}


def find_parts(fits: Callable[[PartChoice], bool], sizes: tuple[int, int]) -> list[PartChoice]:
    """Return every registered part that fits, each with the first of its examples that does."""
    found: list[PartChoice] = []
    part: Any
    for kind in KINDS:
        for name, part in list_parts(kind).items():
            if issubclass(part, Part):
                found += [choice for choice in variants(kind, name, sizes) if fits(choice)][:1]
    return found


@cache
def variants(kind: str, name: str, sizes: tuple[int, int]) -> tuple[PartChoice, ...]:
    """Return a part with the options of its examples, and with its defaults."""
    part, chosen = get_part(kind, name), []
    for options in (*(example.options for example in examples_of(kind, name, *sizes)), {}):
        try:
            chosen.append(PartChoice(kind, name, part.Config(**options)))
        except (TypeError, ValueError):  # an option without a default, or not of these values
            continue
    return tuple(chosen)


def usable(ways: list[PartChoice], moe: MoEConfig) -> list[PartChoice]:
    """Return the parts whose own requirements the layer meets; all of them if there is none."""
    met = [way for way in ways if all(provider(moe, word) is not None for word in requirements(way))]
    return met or ways


def example_trees(kind: str, name: str, num_experts: int = 16, num_choices: int = 2) -> list[Tree]:
    """Return sections `moe` that contain this part, one for each of its examples.

    The other stages are defaults, or parts that provide what is required.

    Raises:
        UserError: if the parts that it finds do not fit together.
    """
    examples = examples_of(kind, name, num_experts, num_choices)
    return [_tree(kind, name, each, (num_experts, num_choices)) for each in examples]


def _tree(kind: str, name: str, example: Example, sizes: tuple[int, int]) -> Tree:
    tree: Tree = {"num_experts": sizes[0], "router": {}, "losses": {}, **copy.deepcopy(example.beside)}
    for stage in STAGES:
        if stage not in tree["router"]:
            first = examples_of(stage, DEFAULTS[stage], *sizes)[0]
            _put(tree, stage, {"name": DEFAULTS[stage], **first.options})
    _put(tree, kind, {"name": name, **example.options})
    for _ in range(MOST_NEIGHBOURS):
        missing = _missing(parse_config({"moe": tree}).moe, sizes)
        found = [way for way in missing if way.kind != kind or kind not in STAGES]
        if not found:
            break
        _put(tree, found[0].kind, found[0].to_dict())
    check_parts(parse_config({"moe": tree}).moe, expert_parallel=1)
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
