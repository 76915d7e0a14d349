"""Parts thrown together at random: refused in one line, or sound in training and in evaluation."""

import copy
import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config import parse_config, to_dict
from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import MoEConfig
from megamoe.errors import UserError
from megamoe.moe.capabilities import capabilities
from megamoe.moe.layer import MoELayer
from megamoe.moe.objective import Objective
from megamoe.moe.part import Part
from megamoe.moe.routing import Routing
from megamoe.moe.validation import check_parts, chosen_parts
from tests.support.moe.build import (
    VOCAB,
    make_context,
    make_hidden,
    make_layer,
    moe_config,
    observed,
    set_tokens,
)
from tests.support.moe.examples import example_trees, examples_of
from tests.support.moe.part_layers import PARTS

DRAWS = 150
TOKENS = 24
SIZES = (16, 2)  # experts, choices of a token
NOTHING = 1e-7  # an entry of a gradient of weight 1 that is no more than rounding

Options = dict[str, Any]
# Options beside those of the parts' own examples.
MORE: dict[tuple[str, str], list[Options]] = {
    ("scorer", "noisy"): [{"start": "normal"}],
    ("scorer", "hierarchical"): [{}, {"groups": 4}],
    ("mask", "expert_dropout"): [{"cluster_size": 4, "rate": 0.25, "level": "global"}],
    ("mask", "group_limit"): [
        {"num_groups": groups, "keep": groups // 4, "score": "sum"} for groups in (4, 8)
    ],
    ("mask", "entropy_prune"): [{"num_groups": 2}, {"bound": 0.0}],
    ("score_function", "softmax"): [{"temperature": 2.0}],
    ("selector", "top_k"): [
        {"k": 1, "weights": "raw"},
        {"k": 8, "weights": "raw"},
        {"k": 3, "weights": "kept_softmax"},
        {"second": "random"},
        {"second": "sampled", "weights": "one"},
        {"renormalise": "after_drops"},
    ],
    ("selector", "threshold"): [{"threshold": 0.6}, {"threshold": 1.0}],
    ("selector", "entropy_aware"): [{"min_k": 2}, {"weights": "renormalised"}],
    ("selector", "sample"): [{"k": 2, "weights": "renormalised"}],
    ("capacity", "device"): [{"devices": 4, "factor": 0.5, "eval_factor": 1.0}],
    ("loss", "switch_balance"): [
        {"first_choice": True, "probs": "first_choice"},
        {"scope": "sequence", "restricted": True},
    ],
    ("loss", "clustering"): [{"cluster_size": 4, "mu": 0.5}],
}


def changed(tree: Options, part: tuple[str, str], dice: random.Random) -> Options:
    """Return the section `moe` with this part and some of its options, instead of its stage's or added."""
    kind, name = part
    examples = [example.options for example in examples_of(kind, name, *SIZES)]
    options, tree = dice.choice([*examples, *MORE.get(part, [])]), copy.deepcopy(tree)
    if kind == "loss":
        tree["losses"][name] = {**options, "weight": 0.1}
    elif kind == "mask":
        masks = tree["router"].setdefault("masks", [])
        masks.insert(dice.randint(0, len(masks)), {"name": name, **options})
    else:
        tree["router"][kind] = {"name": name, **options}
    return tree


def is_accepted(tree: Options) -> bool:
    """Whether the parts go together; if not, they must be refused in one line."""
    try:
        check_parts(moe_config(**tree), 1)
    except UserError as error:
        assert str(error).startswith("moe.") and "\n" not in str(error)
        return False
    return True


@functools.cache
def composed(number: int, part: tuple[str, str]) -> tuple[MoEConfig, int]:
    """Return a composition with this part and others that go with it, and how many of these were refused."""
    dice = random.Random(number)
    tree = dice.choice(example_trees(*part, *SIZES))
    others = [other for other in PARTS if other[0] != part[0] or part[0] in ("mask", "loss")]
    refused = 0
    for other in [part, *dice.sample(others, 6)]:
        more = changed(tree, other, dice)
        tree, refused = (more, refused) if is_accepted(more) else (tree, refused + 1)
    return moe_config(**tree), refused


def part_of(number: int) -> tuple[str, str]:
    return PARTS[number % len(PARTS)]


def test_some_are_refused_and_every_part_is_met() -> None:
    found = [composed(number, part_of(number)) for number in range(DRAWS)]
    assert DRAWS < sum(refused for _, refused in found) < 5 * DRAWS
    met = {(choice.kind, choice.name) for config, _ in found for _, choice in chosen_parts(config)}
    assert met == set(PARTS)


@pytest.mark.parametrize("number", range(DRAWS))
def test_what_is_accepted_is_sound(number: int) -> None:
    check_composition(number, part_of(number))


def test_it_holds_for_the_parts_of_a_plugin(own_parts: list[tuple[str, str]]) -> None:
    for number, part in enumerate(own_parts):
        check_composition(number, part)


@pytest.mark.parametrize("number", range(0, DRAWS, 30))
def test_compositions_are_groups_of_one_model(number: int) -> None:
    """Three compositions, each in layers of its own: every layer has its composition, and is as sound."""
    drawn = [composed(draw, part_of(draw))[0] for draw in range(number, number + 3)]
    groups = []
    for block, moe in enumerate(drawn, 1):
        keys = {key: value for key, value in to_dict(moe).items() if key not in ("layers", "groups")}
        groups.append({**keys, "layers": [block]})
    config = parse_config({"model": {"num_layers": 4}, "moe": {"layers": {"every": 1}, "groups": groups}})
    rest, *found = kinds(config)
    assert (rest.key, rest.layers) == ("moe", [4])
    for kind, moe in zip(found, drawn, strict=True):
        assert replace(kind.moe, layers=moe.layers) == moe
        check_parts(kind.moe, 1)


def check_composition(number: int, part: tuple[str, str]) -> None:
    config, _ = composed(number, part)
    ids_T = torch.arange(TOKENS) ** 2 % VOCAB  # by which no table gives each expert as many tokens
    context = make_context(seed=number, token_ids_T=ids_T, sample_index_B=torch.arange(4))
    layer = make_layer(config, context)
    set_tokens(
        context, num_rollouts=max((loss.num_rollouts for loss in layer.losses.objectives.values()), default=1)
    )
    routings: list[Routing] = []
    layer.router.register_forward_hook(lambda module, inputs, routing: routings.append(routing))
    masks: list[Tensor | None] = []
    for mask in layer.router.masks:
        mask.register_forward_hook(lambda module, inputs, allowed_TE: masks.append(allowed_TE))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    taught = dict.fromkeys(config.losses, 0.0)
    learns = any(parameter.requires_grad for parameter in layer.router.parameters())
    for context.step in range(1, 9):  # two; more where the masks of those left no choice
        optimizer.zero_grad()
        output_TH = layer(make_hidden(TOKENS, seed=context.step))
        check_routing(routings[-1], masks, config)
        if len(routings[-1].wanted.token_N) == TOKENS * routings[-1].num_experts:
            # By chance every p was large enough: what balances loads is even.
            taught = {name: value for name, value in taught.items() if not layer.losses[name].experts_alike}
        for name in taught:
            taught[name] = max(taught[name], gradient_alone(layer, name, routings[-1]))
        train(layer, output_TH)
        optimizer.step()
        for parameter, projection in layer.constraints():
            parameter.data.copy_(projection(parameter.data))
        layer.after_step(routings[-1].wanted_counts_E())
        all_taught = all(largest > NOTHING for largest in taught.values())
        if context.step > 1 and (all_taught or not learns):
            break
    assert all_taught or not learns, taught
    layer.eval()
    with torch.no_grad():
        assert layer(make_hidden(TOKENS)).isfinite().all()
    check_routing(routings[-1], masks, config)


def check_routing(routing: Routing, masks: list[Tensor | None], config: MoEConfig) -> None:
    """Every pair is allowed; every token has one, where it is the tokens that choose and none is dropped."""
    for pairs in (routing.wanted, routing.pairs):
        assert pairs.weight_N.isfinite().all() and (pairs.weight_N >= 0).all()
        pairs = pairs.keep(pairs.token_N < TOKENS)  # not what fills fixed shares
        for allowed_TE in masks:
            assert allowed_TE is None or allowed_TE[pairs.token_N, pairs.expert_N].all()
    if not {"by_experts", "may_choose_none"} & capabilities(config.router.selector):
        assert (torch.bincount(routing.wanted.token_N, minlength=TOKENS) > 0).all()
    if "dropless" in capabilities(config.router.capacity):
        assert routing.pairs is routing.wanted
    masks.clear()


def gradient_alone(layer: MoELayer, name: str, routing: Routing) -> float:
    """The largest entry that a loss of weight 1 sends to the router, or to the experts that it is of."""
    loss = layer.losses[name]
    parameters = list(
        (layer if getattr(type(loss), "attach", None) is not Part.attach else layer.router).parameters()
    )
    waits = isinstance(loss, Objective)
    value = loss(routing, layer.context, *([token_losses()] if waits else []))
    if not value.requires_grad:
        return 0.0
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return max((float(g.abs().max()) for g in gradients if g is not None), default=0.0)


def train(layer: MoELayer, output_TH: Tensor) -> None:
    """Backward, from which everything comes out finite."""
    objective = layer.objective(token_losses()) if layer.losses.objectives else 0.0
    (output_TH.square().mean() + objective).backward()
    assert output_TH.isfinite().all()
    assert all(value.isfinite() for value in observed(layer).losses.values())
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


def token_losses() -> Tensor:
    return torch.linspace(1, 3, TOKENS).cos()
