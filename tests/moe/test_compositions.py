"""Parts thrown together at random: refused in one line, or sound in training and in evaluation."""

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import registry
from megamoe.config.schema import MoEConfig
from megamoe.errors import UserError
from megamoe.moe.composition import check_parts
from megamoe.moe.layer import MoELayer
from megamoe.moe.objective import Objective
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from tests.moe.build import make_hidden, make_layer, moe_config
from tests.moe.part_layers import PARTS

DRAWS = 150
TOKENS = 24
NOTHING = 1e-7  # an entry of a gradient of weight 1 that is no more than rounding

Options = dict[str, Any]
SCORERS: list[Options] = [
    {"name": "linear"},
    {"name": "linear", "jitter": 0.1},
    {"name": "noisy", "start": "normal"},
    {"name": "cosine"},
    {"name": "hierarchical"},
    {"name": "hierarchical", "groups": 4, "noisy": True},
    {"name": "hash"},
    {"name": "stable", "phase_1_steps": 2},
    {"name": "policy"},
]
RESTRICTIONS: list[Options] = [
    {"name": "expert_dropout", "cluster_size": 4},
    {"name": "expert_dropout", "cluster_size": 4, "rate": 0.25, "level": "global"},
    {"name": "gating_dropout", "ranks": 2, "rate": 0.5},
    {"name": "gating_dropout", "ranks": 4, "rate": 0.3},
    {"name": "group_limit", "num_groups": 4, "keep": 2},
    {"name": "group_limit", "num_groups": 4, "keep": 2, "score": "sum"},
    {"name": "group_limit", "num_groups": 8, "keep": 1, "score": "sum"},
    {"name": "entropy_prune", "num_groups": 2, "bound": 1.0},
    {"name": "entropy_prune", "bound": 0.0},
]
GATES: list[Options] = [
    {"name": "softmax"},
    {"name": "softmax", "temperature": 2.0},
    {"name": "softmax", "over": "all"},
    {"name": "softmax", "bias_update": 0.1},
    {"name": "sigmoid"},
    {"name": "sigmoid", "bias_update": 0.1},
]
SELECTORS: list[Options] = [
    {"name": "top_k", "k": 1, "weights": "raw"},
    {"name": "top_k", "k": 4},
    {"name": "top_k", "k": 8, "weights": "raw"},
    {"name": "top_k", "k": 3, "weights": "kept_softmax"},
    {"name": "top_k", "second": "random"},
    {"name": "top_k", "second": "sampled", "weights": "one"},
    {"name": "top_k", "renormalise": "after_drops"},
    {"name": "threshold", "threshold": 0.6},
    {"name": "threshold", "threshold": 1.0},
    {"name": "entropy_aware", "min_k": 2},
    {"name": "entropy_aware", "weights": "renormalised"},
    {"name": "sample"},
    {"name": "sample", "k": 2, "weights": "renormalised"},
    {"name": "sinkhorn", "k": 2},
    {"name": "balanced"},
    {"name": "expert_choice", "allow_non_causal": True},
    {"name": "table", "k": 2},
    {"name": "hierarchical_top_k"},
]
CAPACITIES: list[Options] = [
    {"name": "none"},
    {"name": "per_expert", "factor": 0.75, "min_capacity": 0, "priority": "choice_then_probability"},
    {"name": "per_expert", "factor": 1.0, "min_capacity": 1, "priority": "random"},
    {"name": "device", "devices": 4, "factor": 0.5, "eval_factor": 1.0},
]
LOSSES: list[tuple[str, Options]] = [
    ("switch_balance", {}),
    ("switch_balance", {"first_choice": True, "probs": "first_choice"}),
    ("switch_balance", {"scope": "sequence"}),
    ("switch_balance", {"scope": "sequence", "restricted": True}),
    ("switch_balance", {"scope": "global_batch", "running": True}),
    ("z_loss", {}),
    ("importance", {}),
    ("load", {}),
    ("hierarchical_load", {}),
    ("cosine_balance", {}),
    ("clustering", {"cluster_size": 4, "mu": 0.5}),
    ("device_balance", {"num_groups": 4}),
    ("communication_balance", {"num_groups": 4, "keep": 2}),
    ("stable_balance", {}),
    ("stable_distillation", {}),
    ("grpo", {}),
]
# What mostly stands beside a scorer; any other selector stands there now and then.
BESIDE = {
    "hash": {"table"},
    "noisy": {"top_k", "threshold"},
    "stable": {"top_k"},
    "policy": {"sample"},
    "hierarchical": {"hierarchical_top_k", "threshold"},
}
ALONE = {"table", "balanced"}  # without masks
ELSEWHERE = {"table", "hierarchical_top_k"}
TAUGHT = {"stable", "policy"}  # not without the loss of their own
OF_ONE_SCORER = {
    "load": "noisy",
    "hierarchical_load": "hierarchical",
    "cosine_balance": "cosine",
    "stable_distillation": "stable",
    "grpo": "policy",
}


def draw(number: int) -> Options:
    """The section `moe` of one composition, sound or not."""
    dice = random.Random(number)
    scorer = SCORERS[number % len(SCORERS)]
    usual = dice.random() < 0.9
    selectors = [s for s in SELECTORS if not usual or _stands_beside(scorer["name"], s["name"])]
    selector = dice.choice(selectors)
    drops = usual and selector.get("renormalise") == "after_drops"
    softmax, sigmoid = GATES[0], {"name": "sigmoid"}
    score_functions = GATES if dice.random() < 0.3 else [softmax, sigmoid]
    score_functions = [sigmoid] if usual and selector["name"] == "balanced" else score_functions
    plain = usual and scorer["name"] in ("hierarchical", "policy")
    count_masks = dice.choice([0, 1, 1, 2, 2]) if selector["name"] not in ALONE else 0
    losses = dict(dice.sample(LOSSES, dice.choice([0, 1, 1, 2, 3])))
    if usual:
        here = {scorer["name"], None} if scorer["name"] != "hash" else set()
        losses = {name: options for name, options in losses.items() if OF_ONE_SCORER.get(name) in here}
        for name in (name for name, owner in OF_ONE_SCORER.items() if owner == scorer["name"]):
            losses |= {name: {}} if scorer["name"] in TAUGHT or dice.random() < 0.5 else {}
    return {
        "num_experts": dice.choice([8, 16]),
        "router": {
            "scorer": scorer,
            "masks": dice.sample(RESTRICTIONS, count_masks),
            "score_function": softmax if plain else dice.choice(score_functions),
            "selector": selector,
            "capacity": dice.choice(CAPACITIES[1:] if drops else [*CAPACITIES[:1] * 3, *CAPACITIES]),
        },
        "losses": {name: {**options, "weight": 0.1} for name, options in losses.items()},
    }


def _stands_beside(scorer: str, selector: str) -> bool:
    return selector in BESIDE[scorer] if scorer in BESIDE else selector not in ELSEWHERE


@functools.cache
def accepted(number: int) -> MoEConfig | None:
    """None where the composition is refused, which must be in one line."""
    config = moe_config(**draw(number))
    try:
        check_parts(config, 1)
    except UserError as error:
        assert str(error).startswith("moe.") and "\n" not in str(error)
        return None
    return config


def test_not_all_are_refused_and_every_part_is_met() -> None:
    met = [config for config in map(accepted, range(DRAWS)) if config is not None]
    assert len(met) >= DRAWS / 3
    found: dict[str, set[str]] = {kind: set() for kind in registry.KINDS}
    for config in met:
        router = config.router
        for choice in (router.scorer, *router.masks, router.score_function, router.selector, router.capacity):
            found[choice.kind].add(choice.name)
        found["loss"] |= set(config.losses)
    assert {(kind, name) for kind, names in found.items() for name in names} == set(PARTS)


@pytest.mark.parametrize("number", range(DRAWS))
def test_what_is_accepted_is_sound(number: int) -> None:
    config = accepted(number)
    if config is None:
        return
    context = StepContext(seed=number, token_ids_T=torch.arange(TOKENS), sample_index_B=torch.arange(4))
    context.num_rollouts = 4 if "grpo" in config.losses else 1
    layer = make_layer(config, context)
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
        for allowed_TE in masks:
            assert allowed_TE is None or allowed_TE[pairs.token_N, pairs.expert_N].all()
    if config.router.selector.name != "expert_choice":
        assert (torch.bincount(routing.wanted.token_N, minlength=TOKENS) > 0).all()
    if config.router.capacity.name == "none":
        assert routing.pairs is routing.wanted
    masks.clear()


def gradient_alone(layer: MoELayer, name: str, routing: Routing) -> float:
    """The largest entry that a loss of weight 1 sends to the router."""
    loss = layer.losses[name]
    parameters = list(layer.router.parameters())
    waits = isinstance(loss, Objective)
    value = loss(routing, layer.context, *([token_losses()] if waits else []))
    if not value.requires_grad:
        return 0.0
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return max((float(g.abs().max()) for g in gradients if g is not None), default=0.0)


def train(layer: MoELayer, output_TH: Tensor) -> None:
    """Backward, from which everything comes out finite."""
    objective = layer.objective(token_losses()) if layer.objectives else 0.0
    (output_TH.square().mean() + objective).backward()
    assert output_TH.isfinite().all()
    assert layer.observation is not None
    assert all(value.isfinite() for value in layer.observation.losses.values())
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


def token_losses() -> Tensor:
    return torch.linspace(1, 3, TOKENS).cos()
