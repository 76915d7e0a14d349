"""Capacity: who keeps a place, by hand."""

from typing import Any, cast

import pytest
import torch

from megamoe import registry
from megamoe.moe.capacity.per_expert import BY_VALUE
from megamoe.moe.part import StepContext
from tests.support.moe.build import (
    make_context,
    make_pairs,
    make_part,
    make_router,
    make_scored,
    moe_config,
    route_scores,
)

LIMIT = {"name": "group_limit", "num_groups": 2, "keep": 1}
# Four tokens of two experts; expert 1 is wanted by all of them.
WANTED = [[1, 0], [1, 2], [2, 1], [1, 3]]
PROBS = torch.tensor(
    [[0.4, 0.5, 0.1, 0.0], [0.0, 0.6, 0.2, 0.2], [0.0, 0.55, 0.45, 0.0], [0.1, 0.6, 0.0, 0.3]]
)
SCORED = make_scored(PROBS.log(), PROBS)


def make_capacity(num_experts: int = 4, layer: int = 1, num_choices: int = 1, **options: Any) -> Any:
    return make_part(
        "capacity", "per_expert", num_experts, layer, dims={"num_choices": num_choices}, **options
    )


def test_first_choices_come_before_second_ones_of_a_larger_p() -> None:
    # Expert 0 is the second choice of tokens 0 and 1 (p 0.45, 0.3), the first of 2 and 3 (0.35, 0.4).
    wanted = make_pairs([[1, 0], [2, 0], [0, 1], [0, 1]])
    probs_TE = torch.tensor([[0.45, 0.5, 0.05], [0.3, 0.05, 0.65], [0.35, 0.33, 0.32], [0.4, 0.3, 0.3]])
    scored = make_scored(probs_TE.log(), probs_TE)
    kept = {}
    for priority in ("position", *BY_VALUE, "choice_then_position"):
        for slots in (1, 3):
            part = make_capacity(3, num_choices=2, factor=slots * 3 / 8, priority=priority)
            assert part.slots(4) == slots
            keep_N = part(wanted, scored, StepContext())
            kept[priority, slots] = wanted.token_N[keep_N & (wanted.expert_N == 0)].tolist()
    assert kept["position", 1] == [0] and kept["position", 3] == [0, 1, 2]
    assert kept["probability", 1] == [0] and kept["probability", 3] == [0, 2, 3]
    assert kept["choice_then_probability", 1] == [3] and kept["choice_then_probability", 3] == [0, 2, 3]
    assert kept["choice_then_position", 1] == [2] and kept["choice_then_position", 3] == [0, 2, 3]
    # By the token's largest p: 3 (0.4) before 2 (0.35); then token 1 (0.65) before token 0 (0.5).
    assert kept["batch_prioritised", 1] == [3] and kept["batch_prioritised", 3] == [1, 2, 3]


def test_priority_p_minus_i_does_not_round_p_away() -> None:
    # At the 8th choice p - i steps by 2^-21 in fp32, which hides that token 1 has the larger p.
    probs_TE = torch.tensor([[1e-7] * 8, [2e-7] * 8])
    rows = [[1, 2, 3, 4, 5, 6, 7, 0]] * 2
    part = make_capacity(8, num_choices=8, factor=0.5, priority="choice_then_probability")
    keep_N = part(make_pairs(rows), make_scored(probs_TE, probs_TE), StepContext())
    assert keep_N.tolist() == [False] * 8 + [True] * 8


def test_random_keeps_each_with_equal_chance_and_is_keyed_by_the_token() -> None:
    tokens, experts = 64, 2
    part = make_capacity(experts, factor=0.5, priority="random")
    pairs, scored = make_pairs([[0]] * tokens), make_scored(torch.zeros(tokens, experts))
    times_T = torch.zeros(tokens)
    for step in range(400):
        keep_N = part(pairs, scored, StepContext(seed=1, step=step))
        assert keep_N.sum() == 16
        times_T += keep_N
    assert (times_T / 400 - 0.25).abs().max() < 5 * (0.25 * 0.75 / 400) ** 0.5
    back = make_context(step=1, token_index_T=torch.arange(tokens).flip(0))
    kept = part(pairs, scored, StepContext(step=1))
    assert torch.equal(kept, part(pairs, scored, back).flip(0))
    assert not torch.equal(kept, kept.flip(0))
    other = make_capacity(2, layer=2, factor=0.5, priority="random")
    assert not torch.equal(kept, other(pairs, scored, StepContext(step=1)))


def test_random_draws_for_every_choice_and_once_for_all_evaluations() -> None:
    pairs = make_pairs([[0, 1]] * 64)
    scored = make_scored(torch.zeros(64, 2))
    part = make_capacity(2, num_choices=2, factor=0.5, priority="random")
    keep_T2 = part(pairs, scored, StepContext(step=1)).view(64, 2)
    assert not torch.equal(keep_T2[:, 0], keep_T2[:, 1])
    part.eval()
    first, second = (part(pairs, scored, StepContext(step=step)) for step in (1, 2))
    assert torch.equal(first, second)
    assert first.view(64, 2)[32:].any(), "as a place of the first tokens it would be position"


@pytest.mark.parametrize("priority", [*BY_VALUE, "random"])
def test_priorities_send_no_gradient(priority: str) -> None:
    scored = make_scored(PROBS.log(), PROBS.clone().requires_grad_())
    kept = make_capacity(num_choices=2, factor=0.5, priority=priority)
    assert not kept(make_pairs(WANTED), scored, StepContext()).requires_grad


@pytest.mark.parametrize(
    ("factor", "num_choices", "num_tokens", "num_experts", "expected"),
    [
        (1.0, 1, 8, 4, 2),
        (1.0, 1, 9, 4, 3),  # 2.25
        (1.25, 2, 16, 8, 5),
        (2.0, 2, 3, 8, 2),  # 1.5
        (1.1, 2, 50, 10, 11),  # in binary floats a little over 11
        (1.25, 2, 0, 8, 0),
    ],
)
def test_the_places_are_the_ceiling_of_the_formula(
    factor: float, num_choices: int, num_tokens: int, num_experts: int, expected: int
) -> None:
    part = make_capacity(num_experts, num_choices=num_choices, factor=factor)
    assert part.slots(num_tokens) == expected


def test_min_capacity_is_a_floor_and_eval_factor_is_of_evaluation() -> None:
    part = make_capacity(factor=1.0, eval_factor=2.0, min_capacity=4)
    assert part.slots(12) == 4  # 3, under the floor
    assert part.slots(40) == 10
    assert part.eval().slots(40) == 20
    assert make_capacity(factor=1.0).eval().slots(40) == 10


def test_there_is_no_floor_where_the_papers_have_none() -> None:
    """By default and in every preset, C = ceil(factor * k * T / E), and at least 1."""
    part = make_capacity(8, factor=1.0)
    assert [part.slots(num_tokens) for num_tokens in (1, 8, 9, 24)] == [1, 1, 2, 3]
    for name in registry.list_presets():
        capacity = moe_config(router=name, num_experts=16).router.capacity
        assert capacity.name != "per_expert" or capacity.options.min_capacity == 0, name


def test_none_keeps_every_pair() -> None:
    assert make_part("capacity", "none")(make_pairs(WANTED), SCORED, StepContext()) is None


@pytest.mark.parametrize(
    "mask",
    [{"name": "group_limit", "num_groups": 8, "keep": 3}, {"name": "entropy_prune", "bound": 1.8}],
    ids=lambda mask: mask["name"],
)
def test_masks_by_token_leave_the_places_as_the_router_collapses(mask: dict[str, Any]) -> None:
    """All 64 tokens to the first six of 16 experts: C = 6 * 64 / 16, not 6 * 64 / 6."""
    capacity = {"name": "per_expert", "factor": 1.0}
    router = make_router(16, masks=[mask], selector={"k": 6}, capacity=capacity)
    routing = route_scores(router, torch.tensor([9.0] * 6 + [5.0] * 10).expand(64, 16))
    assert routing.candidates_TE is not None and not routing.candidates_TE[:, 6:].any()
    assert routing.wanted_counts_E().tolist() == [64] * 6 + [0] * 10
    assert routing.counts_E().tolist() == [24] * 6 + [0] * 10


def test_masks_of_the_whole_step_give_the_others_more_places() -> None:
    """Half of the experts are dropped, and of the rest a token sees two of four groups: C = 2 * 64 / 8."""
    masks = [
        {"name": "expert_dropout", "cluster_size": 4},
        {"name": "group_limit", "num_groups": 4, "keep": 2},
    ]
    capacity = {"name": "per_expert", "factor": 1.0}
    router = make_router(16, masks=masks, selector={"k": 2}, capacity=capacity)
    routing = route_scores(router, torch.arange(16.0).expand(64, 16))
    assert routing.open_E is not None and routing.open_E.sum() == 8
    assert routing.counts_E().max() == cast(Any, router.capacity).slots(64, routing.open_E) == 16


@pytest.mark.parametrize("priority", BY_VALUE)
@pytest.mark.parametrize(
    ("score_function", "masks", "scores"),
    [
        ("sigmoid", [], [[18.0, 0.0], [20.0, 0.0], [19.0, 0.0]]),  # all p round to 1
        ("sigmoid", [LIMIT], [[18.0, 0.0], [20.0, 0.0], [19.0, 0.0]]),
        ("softmax", [], [[5.0, 4.0], [1.0, -3.0]]),  # token 0 has the larger score, token 1 the larger p
    ],
)
def test_which_values_are_compared(
    priority: str, score_function: str, masks: list[dict[str, Any]], scores: list[list[float]]
) -> None:
    """One place at expert 0; by equal p it would be the first token's."""
    capacity = {"name": "per_expert", "factor": 0.5, "priority": priority}
    one = {"k": 1, "weights": "raw"}
    router = make_router(2, score_function=score_function, masks=masks, selector=one, capacity=capacity)
    assert route_scores(router, torch.tensor(scores)).pairs.token_N.tolist() == [1]
