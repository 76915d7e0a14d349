"""Properties of every registered part: finite, deterministic, the scorer learns, its state survives."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import registry
from megamoe.moe.auxiliary_losses import AuxiliaryLosses
from megamoe.moe.layer import MoELayer
from megamoe.moe.objective import Objective
from megamoe.moe.part import CAPABILITIES, Part, StepContext
from megamoe.moe.routing import Routing, has_row_per_token
from tests.moe.test_process_groups import spread_of
from tests.support.moe.build import (
    VOCAB,
    make_context,
    make_hidden,
    make_layer,
    make_part,
    moe_config,
    observed,
    set_tokens,
)
from tests.support.moe.examples import example_trees, examples_of
from tests.support.moe.part_layers import PART_IDS, PARTS

EXPERTS = 16
every_part = pytest.mark.parametrize(("kind", "name"), PARTS, ids=PART_IDS)
every_loss = pytest.mark.parametrize(
    "name",
    [
        name
        for name, part in registry.list_parts("loss").items()
        if getattr(part, "attach", None) is Part.attach
    ],
)


def layers_with(kind: str, name: str, seed: int = 1, **more: Any) -> list[MoELayer]:
    """A layer for each of the part's examples; `more`: of the section `moe`."""
    found = []
    for tree in example_trees(kind, name):
        context = make_context(seed=3, step=2, token_ids_T=torch.arange(24), sample_index_B=torch.arange(4))
        set_tokens(context, num_rollouts=4)
        found.append(make_layer(moe_config(**tree, **more), context, seed=seed))
    return found


def layer_with(kind: str, name: str, seed: int = 1, **more: Any) -> MoELayer:
    """The first of them."""
    return layers_with(kind, name, seed, **more)[0]


def chosen_in(layer: MoELayer, kind: str, name: str) -> list[Part]:
    """The modules of the part in the layer."""
    found = registry.get_part(kind, name)
    return [part for part in layer.modules() if isinstance(part, Part) and type(part) is found]


def step(layer: MoELayer) -> list[Tensor]:
    """Output, losses and gradients of one forward and backward."""
    output_TH = layer(make_hidden(24))
    (output_TH.square().sum() + objective(layer)).backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return [output_TH.detach(), *observed(layer).losses.values(), *gradients]


def objective(layer: MoELayer, num_tokens: int = 24) -> Tensor | float:
    """Return the objective's value for token losses that differ between tokens."""
    return layer.objective(torch.linspace(1, 3, num_tokens).cos()) if layer.losses.objectives else 0.0


@every_part
def test_finite_and_the_same_again(kind: str, name: str) -> None:
    for one, other in zip(layers_with(kind, name), layers_with(kind, name), strict=True):
        first, second = step(one), step(other)
        assert all(value.isfinite().all() for value in first)
        assert len(first) == len(second)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_part
def test_the_task_teaches_the_scorer_and_all_experts(kind: str, name: str) -> None:
    for mode in ("sum", "gated"):
        layer = layer_with(kind, name, num_shared_experts=1, shared_expert_mode=mode)
        layer.losses = AuxiliaryLosses({}, layer.router.dims)
        layer(make_hidden(24)).square().sum().backward()
        router: Any = layer.router
        required = [part.must_be_required(part.config) for part in (router.scorer, router.selector)]
        of_losses = {word for words in required for kind, word in words if kind == "loss"}
        weights = {weight for weight, _ in layer.named_parameters()}
        assert taught(layer) == weights - reached_from(layer, of_losses)


@every_loss
def test_a_loss_alone_teaches_the_scorer_and_no_expert(name: str) -> None:
    """All of the scorer, what the extras are made of that the loss requires, or both."""
    layer = layer_with("loss", name, num_shared_experts=1)
    for other in layer.losses.weights:
        layer.losses.weights[other] *= other == name
    nothing = (layer(make_hidden(24)) * 0).sum()
    (nothing + objective(layer)).backward()
    whole = {f"router.scorer.{weight}" for weight, _ in layer.router.scorer.named_parameters()}
    loss: Any = layer.losses[name]
    of_extras = reached_from(layer, set(loss.requires(loss.config)))
    assert taught(layer) and taught(layer) in (whole, of_extras, whole | of_extras)


@every_part
def test_without_tokens_losses_are_0_and_gradients_finite(kind: str, name: str) -> None:
    for layer in layers_with(kind, name):
        set_tokens(layer.context, token_ids_T=torch.arange(0))
        (layer(make_hidden(0)).sum() + objective(layer, 0)).backward()
        assert [value.item() for value in observed(layer).losses.values()] == [0] * len(layer.losses)
        gradients = [weight.grad for weight in layer.parameters() if weight.grad is not None]
        assert all(gradient.isfinite().all() for gradient in gradients)


@every_loss
def test_a_loss_is_of_the_pairs_that_were_wanted(name: str) -> None:
    """The pairs that the capacity drops count as well."""
    layer = layer_with("loss", name)
    routing = layer.router(make_hidden(24), layer.context)
    loss = layer.losses[name]
    arguments = (layer.context, torch.linspace(1, 3, 24).cos())[: 2 if isinstance(loss, Objective) else 1]
    expected = loss(routing, *arguments)
    routing.pairs = routing.wanted.keep(torch.arange(len(routing.wanted.token_N)) % 3 == 0)
    assert torch.equal(loss(routing, *arguments), expected)


def reached_from(layer: MoELayer, names: set[str]) -> set[str]:
    """The router's parameters that these extras are made of."""
    extras = layer.router(make_hidden(24), layer.context).extras
    values = [value.sum() for key, value in extras.items() if key in names and value.requires_grad]
    weights = {f"router.{name}": weight for name, weight in layer.router.named_parameters()}
    if not values:
        return set()
    gradients = torch.autograd.grad(values, list(weights.values()), allow_unused=True)
    return {weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None}


def taught(layer: MoELayer) -> set[str]:
    """The names of the parameters with a gradient that is not 0."""
    return {
        name for name, weight in layer.named_parameters() if weight.grad is not None and weight.grad.any()
    }


@every_part
def test_the_state_survives_a_checkpoint(kind: str, name: str) -> None:
    layer, other = layer_with(kind, name), layer_with(kind, name, seed=5)
    expected_TH = layer(make_hidden(24))
    assert not torch.equal(other(make_hidden(24)), expected_TH)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(make_hidden(24)), expected_TH)


@every_part
def test_evaluation_repeats_itself(kind: str, name: str) -> None:
    layer = layer_with(kind, name).eval()
    first_TH = layer(make_hidden(24))
    layer.context.step += 1
    assert torch.equal(layer(make_hidden(24)), first_TH)


@pytest.mark.parametrize("name", registry.list_parts("scorer"))
def test_a_scorer_scores_each_token_by_itself(name: str) -> None:
    """Tensor parallelism requires this: a rank with some of the tokens must compute the same scores for
    them.
    """
    for training in (True, False):
        for layer in layers_with("scorer", name):
            scores_by_itself(layer.train(training))


def scores_by_itself(layer: MoELayer) -> None:
    for weight in layer.router.scorer.parameters():
        if not weight.any():  # a scorer that starts at 0 would show nothing
            torch.nn.init.normal_(weight)
    whole = scored(layer.router.scorer, make_hidden(24), layer.context)
    for size in (2, 3):
        for rank in range(size):
            own = slice(rank * 24 // size, (rank + 1) * 24 // size)
            context = spread_of(size, rank).local_context(layer.context, 24 // size)
            part = scored(layer.router.scorer, make_hidden(24)[own], context)
            assert part.keys() == whole.keys()
            for key, value in part.items():
                expected = whole[key][own] if has_row_per_token(key) else whole[key]
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=key)


def scored(scorer: Any, hidden_TH: Tensor, context: StepContext) -> dict[str, Tensor]:
    """The scores and the extras."""
    found = scorer(hidden_TH, context)
    scores_TE, extras = found if isinstance(found, tuple) else (found, {})
    return {"scores_TE": scores_TE, **extras}


@every_part
def test_a_part_is_as_it_declares(kind: str, name: str) -> None:
    """Other parts' checks go by it."""
    for layer in layers_with(kind, name):
        routing = layer.router(make_hidden(24), layer.context)
        for part in chosen_in(layer, kind, name):
            provided = type(part).provides(part.config)
            assert {word for word in provided if word not in CAPABILITIES} <= routing.extras.keys()
            if kind == "scorer":
                selector: Any = layer.router.selector
                assert routing.extras.keys() <= provided | selector.provides(selector.config)
            elif kind == "score_function":
                assert (part.bias_E is not None) == ("bias" in provided)
                sums = routing.probs_TE.sum(dim=-1)
                assert not {"softmax_of_scores", "sums_to_1"} & provided or torch.allclose(
                    sums, torch.ones(24)
                )
            elif kind == "mask":
                keeps_its_bounds(part, routing)
            elif kind == "selector":
                chooses_as_declared(part, provided, routing)
            elif kind == "capacity" and "dropless" in provided:
                assert routing.pairs is routing.wanted


def keeps_its_bounds(mask: Any, routing: Routing) -> None:
    bounds = mask.num_candidates(mask.config, routing.num_experts)
    assert routing.candidates_TE is not None
    left_TG = routing.candidates_TE.unflatten(1, (bounds.groups, -1)).sum(dim=-1)
    kept_T = (left_TG > 0).sum(dim=-1)
    assert kept_T.min() >= bounds.kept[0] and kept_T.max() <= bounds.kept[1]
    assert left_TG[left_TG > 0].min() >= bounds.each[0] and left_TG.max() <= bounds.each[1]
    if mask.step_wide:
        assert (routing.candidates_TE == routing.candidates_TE[0]).all()


def chooses_as_declared(selector: Any, provided: set[str], routing: Routing) -> None:
    wanted, tokens = routing.wanted, routing.num_tokens
    count_T = torch.bincount(wanted.token_N, minlength=tokens)
    if "by_experts" not in provided:
        assert count_T.min() >= selector.wanted(selector.config, routing.num_experts)
    if selector.takes_all(selector.config, routing.num_experts):
        assert count_T.min() == routing.num_experts
    assert ("fixed_weights" in provided) == (not wanted.weight_N.requires_grad)
    if "normalised" in provided:
        sum_T = wanted.weight_N.new_zeros(tokens).index_add(0, wanted.token_N, wanted.weight_N)
        assert torch.allclose(sum_T, torch.ones(tokens))
    if "even_load" in provided:
        assert torch.bincount(wanted.expert_N, minlength=routing.num_experts).unique().numel() <= 2


def starts_of(name: str) -> list[dict[str, Any]]:
    """Return the options of a scorer's layers here: its examples, and its defaults."""
    return [{}, *(example.options for example in examples_of("scorer", name, EXPERTS, 2))]


def make_scorer(name: str, options: dict[str, Any], layer: int = 1, seed: int = 1) -> Any:
    dims = {"seed": seed, "init_std": 0.4, "vocab_size": VOCAB, "num_choices": 2}
    return make_part("scorer", name, EXPERTS, layer, dims, **options)


# By default the weights of `noisy` start at 0.
STARTS = [(name, options) for name in registry.list_parts("scorer") for options in starts_of(name)]
every_start = pytest.mark.parametrize(("name", "options"), [*STARTS, ("noisy", {"start": "normal"})], ids=str)


@every_start
def test_a_scorers_start_depends_on_seed_and_layer_alone(name: str, options: dict[str, Any]) -> None:
    first = make_scorer(name, options).state_dict()
    torch.manual_seed(9)
    again, *others = (make_scorer(name, options, *key).state_dict() for key in ((1, 1), (2, 1), (1, 2)))
    for key, value in first.items():
        assert torch.equal(again[key], value)
        is_drawn = value.numel() > 1 and bool((value != value.flatten()[0]).any())
        assert all(torch.equal(other[key], value) != is_drawn for other in others), key


@every_start
def test_a_scorer_can_be_counted_without_memory(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        counted = make_scorer(name, options).state_dict()
    assert all(tensor.is_meta for tensor in counted.values())
    built = make_scorer(name, options).state_dict()
    assert {key: t.shape for key, t in counted.items()} == {key: t.shape for key, t in built.items()}


@every_start
def test_a_scorer_computes_in_fp32_whatever_its_weights_are(name: str, options: dict[str, Any]) -> None:
    low = make_scorer(name, options).bfloat16()
    exact, context = copy.deepcopy(low).float(), make_context(token_ids_T=torch.arange(24))
    expected = scored(exact, make_hidden(24), context)
    for key, value in scored(low, make_hidden(24), context).items():
        assert torch.equal(value, expected[key]) and value.dtype == expected[key].dtype, key
    assert scored(low, make_hidden(24), context)["scores_TE"].dtype == torch.float32


OVER_PARTS = [
    test_without_tokens_losses_are_0_and_gradients_finite,
    test_finite_and_the_same_again,
    test_the_task_teaches_the_scorer_and_all_experts,
    test_the_state_survives_a_checkpoint,
    test_evaluation_repeats_itself,
    test_a_part_is_as_it_declares,
]


@pytest.mark.parametrize("holds", OVER_PARTS, ids=lambda test: test.__name__)
def test_it_holds_for_the_parts_of_a_plugin(own_parts: list[tuple[str, str]], holds: Any) -> None:
    for kind, name in own_parts:
        holds(kind, name)


def test_it_holds_for_the_losses_and_scorers_of_a_plugin(own_parts: list[tuple[str, str]]) -> None:
    for kind, name in own_parts:
        if kind == "scorer":
            test_a_scorer_scores_each_token_by_itself(name)
            for options in starts_of(name):
                test_a_scorers_start_depends_on_seed_and_layer_alone(name, options)
                test_a_scorer_can_be_counted_without_memory(name, options)
                test_a_scorer_computes_in_fp32_whatever_its_weights_are(name, options)
        elif kind == "loss":
            test_a_loss_alone_teaches_the_scorer_and_no_expert(name)
            test_a_loss_is_of_the_pairs_that_were_wanted(name)
