"""What holds for every registered part: finite, deterministic, the scorer learns, its state survives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import registry
from megamoe.moe.layer import MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.routing import has_row_per_token
from tests.moe.build import make_hidden, make_layer, moe_config
from tests.moe.test_process_groups import spread_of

PARTS = [(kind, name) for kind in registry.KINDS for name in registry.list_parts(kind)]
every_part = pytest.mark.parametrize(("kind", "name"), PARTS, ids=[f"{k}-{n}" for k, n in PARTS])

# The section `moe` around a part that does not stand among defaults.
LEVELS = {"scorer": {"name": "hierarchical", "noisy": True}, "selector": "hierarchical_top_k"}
POLICY = {"scorer": "policy", "selector": "sample"}
COMPANY: dict[tuple[str, str], dict[str, Any]] = {
    ("mask", "expert_dropout"): {"num_experts": 16},
    ("mask", "group_limit"): {"num_experts": 16},
    ("loss", "clustering"): {"num_experts": 16},
    ("loss", "device_balance"): {"num_experts": 16},
    ("loss", "communication_balance"): {"num_experts": 16},
    ("loss", "load"): {"router": {"scorer": "noisy"}},
    ("loss", "cosine_balance"): {"router": {"scorer": "cosine"}},
    ("scorer", "hash"): {"router": {"selector": "table"}},
    ("selector", "table"): {"router": {"scorer": "hash"}},
    ("selector", "hierarchical_top_k"): {"router": LEVELS},
    ("loss", "hierarchical_load"): {"num_experts": 9, "router": LEVELS},
    ("scorer", "stable"): {"losses": {"stable_distillation": 0.1}},
    ("loss", "stable_distillation"): {"router": {"scorer": "stable"}},
    ("scorer", "policy"): {"router": POLICY},
    ("loss", "grpo"): {"router": POLICY},
}


# What of the scorer gets no gradient. From the task: a router beside it that only a loss teaches.
NOT_BY_THE_TASK = {
    ("scorer", "stable"): {"light_embedding", "light_centroids"},
    ("loss", "stable_distillation"): {"light_embedding", "light_centroids"},
}
# From a loss alone: the light router's loss teaches it and nothing else; tau_0 is no learned temperature.
NOT_BY_THE_LOSS = {
    "stable_distillation": {"centroids"},
    "cosine_balance": {"log_temperature"},
}


def layer_with(kind: str, name: str, seed: int = 1, **more: Any) -> MoELayer:
    """A layer with this part, otherwise of defaults or of its company; `more`: of the section `moe`."""
    tree: dict[str, Any] = {"num_experts": 4, **more, **COMPANY.get((kind, name), {})}
    if kind == "loss":
        tree["losses"] = {name: 0.1}
    else:
        part = {"masks": [name]} if kind == "mask" else {kind: name}
        tree["router"] = {**tree.get("router", {}), **part}
    context = StepContext(seed=3, step=2, token_ids_T=torch.arange(24), sample_index_B=torch.arange(4))
    context.num_rollouts = 4
    return make_layer(moe_config(**tree), context, seed=seed)


def step(layer: MoELayer) -> list[Tensor]:
    """Output, losses and gradients of one forward and backward."""
    output_TH = layer(make_hidden(24))
    (output_TH.square().sum() + objective(layer)).backward()
    assert layer.observation is not None
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return [output_TH.detach(), *layer.observation.losses.values(), *gradients]


def objective(layer: MoELayer) -> Tensor | float:
    """What waits for the token losses, which differ from token to token."""
    return layer.objective(torch.linspace(1, 3, 24).cos()) if layer.objectives else 0.0


@every_part
def test_finite_and_the_same_again(kind: str, name: str) -> None:
    first, second = step(layer_with(kind, name)), step(layer_with(kind, name))
    assert all(value.isfinite().all() for value in first)
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_part
def test_gradient_reaches_the_scorer(kind: str, name: str) -> None:
    layer = layer_with(kind, name)
    step(layer)
    gradients = [parameter.grad for parameter in layer.router.scorer.parameters()]
    assert all(gradient is not None and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", registry.list_parts("loss"))
def test_the_gradient_of_a_loss_reaches_the_scorer_by_itself(name: str) -> None:
    layer = layer_with("loss", name)
    nothing = (layer(make_hidden(24)) * 0).sum()
    (nothing + objective(layer)).backward()
    assert any(p.grad is not None and p.grad.any() for p in layer.router.scorer.parameters())


@every_part
@pytest.mark.parametrize("mode", ["sum", "gated"])
def test_the_task_teaches_the_scorer_and_all_experts(kind: str, name: str, mode: str) -> None:
    layer = layer_with(kind, name, num_shared_experts=1, shared_expert_mode=mode)
    layer.losses = torch.nn.ModuleDict()
    layer(make_hidden(24)).square().sum().backward()
    without = {f"router.scorer.{weight}" for weight in NOT_BY_THE_TASK.get((kind, name), ())}
    assert taught(layer) == {weight for weight, _ in layer.named_parameters()} - without


@pytest.mark.parametrize("name", registry.list_parts("loss"))
def test_a_loss_alone_teaches_the_scorer_and_no_expert(name: str) -> None:
    layer = layer_with("loss", name, num_shared_experts=1)
    for other in layer.loss_weights:
        layer.loss_weights[other] *= other == name
    nothing = (layer(make_hidden(24)) * 0).sum()
    (nothing + objective(layer)).backward()
    scorer = {weight for weight, _ in layer.router.scorer.named_parameters()} - NOT_BY_THE_LOSS.get(
        name, set()
    )
    assert taught(layer) == {f"router.scorer.{weight}" for weight in scorer}


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", registry.list_parts("scorer"))
def test_a_scorer_scores_each_token_by_itself(name: str, training: bool) -> None:
    """As tensor parallelism asks of it: a rank that has some of the tokens finds the same for them."""
    layer = layer_with("scorer", name).train(training)
    if name == "linear":
        layer.router.scorer.config.jitter = 0.2
    for weight in layer.router.scorer.parameters():
        if not weight.any():  # a scorer that starts at 0 would show nothing
            torch.nn.init.normal_(weight)
    whole = scored(layer, make_hidden(24), layer.context)
    for size in (2, 3):
        for rank in range(size):
            own = slice(rank * 24 // size, (rank + 1) * 24 // size)
            context = spread_of(size, rank).own_context(layer.context, 24 // size)
            part = scored(layer, make_hidden(24)[own], context)
            assert part.keys() == whole.keys()
            for key, value in part.items():
                expected = whole[key][own] if has_row_per_token(key) else whole[key]
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=key)


def scored(layer: MoELayer, hidden_TH: Tensor, context: StepContext) -> dict[str, Tensor]:
    """The scores and the extras."""
    found = layer.router.scorer(hidden_TH, context)
    scores_TE, extras = found if isinstance(found, tuple) else (found, {})
    return {"scores_TE": scores_TE, **extras}
