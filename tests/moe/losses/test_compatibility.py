"""Losses that could teach nothing, and the compositions beside them that can."""

from typing import Any

import pytest
import torch

from megamoe.errors import UserError
from megamoe.moe.validation import check_parts
from tests.support.moe.build import make_context, make_hidden, make_layer, moe_config

EXPERTS = 8
EVERY = "sends every token to every expert that it may choose"
EVEN = "gives every expert as many tokens"
ALL_K: dict[str, Any] = {"selector": {"k": EXPERTS}}
SURE: dict[str, Any] = {"selector": {"name": "threshold", "threshold": 1.0}}
CHOICE: dict[str, Any] = {"selector": {"name": "expert_choice", "allow_non_causal": True}}
ASSIGNED: dict[str, Any] = {"selector": "balanced", "score_function": "sigmoid"}
HALF = {"masks": [{"name": "expert_dropout", "cluster_size": 4}]}
PRUNE = {"masks": [{"name": "entropy_prune", "bound": 0.7}]}
LIMIT = {"masks": [{"name": "group_limit", "num_groups": 4, "keep": 2}]}
GROUP: dict[str, Any] = {"masks": [{"name": "group_limit", "num_groups": 4, "keep": 1}]}
ONE = {"masks": [{"name": "entropy_prune", "bound": 0.0}]}
ONE_OF_TWO: list[Any] = [{"name": "group_limit", "num_groups": 2, "keep": 1}]  # after HALF: two candidates
OVER_ALL = {"name": "softmax", "over": "all"}
PAIR: dict[str, Any] = {"selector": {"k": 2, "second": "random"}}


def gradient_of(loss: str, options: dict[str, Any], router: dict[str, Any], num_experts: int) -> float:
    """The largest entry that the loss alone sends to a scorer's weight."""
    losses = {loss: {"weight": 1.0, **options}}
    context = make_context(seed=3, step=1, sample_index_B=torch.arange(2), token_ids_T=torch.arange(24))
    layer = make_layer(moe_config(num_experts=num_experts, router=router, losses=losses), context)
    (layer(make_hidden(24)) * 0).sum().backward()
    return max(float(p.grad.abs().max()) for p in layer.router.parameters() if p.grad is not None)


CONSTANT = [
    ("switch_balance", {}, ALL_K, EVERY),
    ("switch_balance", {}, SURE, EVERY),
    ("switch_balance", {}, CHOICE, EVEN),
    ("switch_balance", {}, {**HALF, "selector": {"k": 4}}, EVERY),
    ("switch_balance", {"scope": "global_batch"}, CHOICE, EVEN),
    ("switch_balance", {"scope": "sequence"}, ALL_K, "wants all 8 experts"),
    ("switch_balance", {"scope": "sequence"}, {**ALL_K, **PRUNE}, "wants all 8 experts"),
    ("switch_balance", {"scope": "sequence", "restricted": True}, SURE, EVERY),
    ("cosine_balance", {}, {**ALL_K, "scorer": "cosine"}, EVERY),
    ("cosine_balance", {}, {**CHOICE, "scorer": "cosine"}, EVEN),
    ("device_balance", {"num_groups": 4}, ALL_K, EVERY),
    ("communication_balance", {"num_groups": 4}, SURE, EVERY),
    ("stable_balance", {}, ALL_K, EVERY),
    ("stable_balance", {}, CHOICE, EVEN),
    ("stable_balance", {}, ASSIGNED, EVEN),
    ("switch_balance", {}, GROUP, EVERY),
    ("switch_balance", {}, {**GROUP, "score_function": "sigmoid"}, EVERY),
    ("switch_balance", {}, {**GROUP, **CHOICE}, EVEN),
    ("switch_balance", {}, {**CHOICE, **LIMIT}, EVEN),
    (
        "switch_balance",
        {},
        {**ONE, "score_function": "sigmoid", "selector": {"k": 1, "weights": "raw"}},
        EVERY,
    ),
    (
        "switch_balance",
        {"first_choice": True},
        {**ONE, "score_function": "sigmoid", "selector": {"k": 1, "weights": "raw"}},
        EVERY,
    ),
    ("cosine_balance", {}, {**GROUP, "scorer": "cosine"}, EVERY),
    ("switch_balance", {}, {"masks": [*LIMIT["masks"], *GROUP["masks"]]}, EVERY),
    ("switch_balance", {}, {"masks": [*HALF["masks"], *ONE_OF_TWO]}, EVERY),
    ("stable_balance", {}, GROUP, EVERY),
    ("switch_balance", {}, {**GROUP, "score_function": OVER_ALL}, EVERY),
    ("z_loss", {}, {"scorer": "hierarchical"}, "logsumexp is always 0"),
]


@pytest.mark.parametrize(("loss", "options", "router", "message"), CONSTANT, ids=str)
def test_a_loss_without_gradient_is_refused(
    loss: str, options: dict[str, Any], router: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^moe.losses.{loss}: .*{message}.*leave .* out, or ") as caught:
        check_parts(moe_config(num_experts=EXPERTS, router=router, losses={loss: options}), 1)
    assert "\n" not in str(caught.value)
    assert gradient_of(loss, options, router, EXPERTS) < 1e-6  # it has none indeed, up to rounding


@pytest.mark.parametrize(
    ("loss", "options", "router", "num_experts"),
    [
        ("switch_balance", {"first_choice": True}, ALL_K, 8),
        ("switch_balance", {"first_choice": True}, SURE, 8),
        ("switch_balance", {"first_choice": True}, CHOICE, 8),
        ("switch_balance", {"scope": "sequence"}, CHOICE, 8),
        ("switch_balance", {}, {"selector": {"k": 7}}, 8),
        ("switch_balance", {}, {"selector": {"name": "threshold", "threshold": 0.9}}, 8),
        ("switch_balance", {}, {**SURE, **PRUNE}, 8),
        ("switch_balance", {}, {**LIMIT, "selector": {"k": 4}}, 8),
        ("switch_balance", {}, {**GROUP, "selector": {"k": 1, "weights": "raw"}}, 8),
        ("switch_balance", {"scope": "sequence", "restricted": True}, GROUP, 8),
        ("device_balance", {"num_groups": 4}, GROUP, 8),
        ("stable_balance", {}, {**GROUP, "score_function": "sigmoid"}, 8),
        ("stable_balance", {}, {**GROUP, "score_function": OVER_ALL}, 8),
        ("switch_balance", {}, PAIR, 2),
        ("cosine_balance", {"first_choice": True}, {**ALL_K, "scorer": "cosine"}, 8),
        ("device_balance", {"num_groups": 4}, {"selector": {"k": 7}}, 8),
        ("stable_balance", {}, {"selector": {"k": 7}}, 8),
        ("importance", {}, CHOICE, 8),
        ("z_loss", {}, ALL_K, 8),
    ],
    ids=str,
)
def test_a_loss_with_a_gradient_is_accepted(
    loss: str, options: dict[str, Any], router: dict[str, Any], num_experts: int
) -> None:
    check_parts(moe_config(num_experts=num_experts, router=router, losses={loss: options}), 1)
    assert gradient_of(loss, options, router, num_experts) > 1e-4


def test_balanced_is_even_for_first_choices_too() -> None:
    losses = {"switch_balance": {"first_choice": True}}
    with pytest.raises(UserError, match=EVEN):
        check_parts(moe_config(num_experts=EXPERTS, router=ASSIGNED, losses=losses), 1)
