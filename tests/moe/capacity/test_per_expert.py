"""Capacity: who keeps a place, by hand."""

import pytest
import torch

from megamoe.errors import UserError
from tests.moe.build import make_pairs, make_part, moe_config

# Four tokens of two experts; expert 1 is wanted by all of them.
WANTED = [[1, 0], [1, 2], [2, 1], [1, 3]]
WEIGHTS = [[0.5, 0.4], [0.9, 0.1], [0.6, 0.7], [0.7, 0.2]]


def keep(priority: str, factor: float = 1.0, **options: object) -> list[int]:
    part = make_part("capacity", "per_expert", factor=factor, min_capacity=0, priority=priority, **options)
    keep_N = part(make_pairs(WANTED, WEIGHTS), 4, 2)
    assert keep_N.dtype == torch.bool
    return keep_N.int().tolist()


def test_by_position_the_first_tokens_keep_their_places() -> None:
    assert keep("position", 1.0) == [1, 1, 1, 1, 1, 0, 0, 1]  # C = 2: tokens 0 and 1 at expert 1
    assert keep("position", 0.5) == [1, 1, 0, 1, 0, 0, 0, 1]  # C = 1: token 1 has expert 2 before token 2


def test_by_probability_the_largest_weights_keep_theirs() -> None:
    # Expert 1 is offered 0.5, 0.9, 0.7, 0.7; of the equal ones the earlier token's comes first.
    assert keep("probability", 1.0) == [0, 1, 1, 1, 1, 1, 0, 1]
    assert keep("probability", 0.5) == [0, 1, 1, 0, 1, 0, 0, 1]  # expert 2: 0.6 before 0.1


def test_probability_sends_no_gradient_and_needs_none() -> None:
    pairs = make_pairs(WANTED, WEIGHTS)
    pairs.weight_N.requires_grad_()
    kept = make_part("capacity", "per_expert", factor=0.5, min_capacity=0, priority="probability")
    assert not kept(pairs, 4, 2).requires_grad


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
    part = make_part("capacity", "per_expert", num_experts=num_experts, factor=factor, min_capacity=0)
    assert part.places(num_tokens, num_choices) == expected


def test_min_capacity_is_a_floor_and_eval_factor_is_of_evaluation() -> None:
    part = make_part("capacity", "per_expert", factor=1.0, eval_factor=2.0)
    assert part.places(12, 1) == 4  # 3, under the default floor of 4
    assert part.places(40, 1) == 10
    assert part.eval().places(40, 1) == 20
    assert make_part("capacity", "per_expert", factor=1.0).eval().places(40, 1) == 10


def test_none_keeps_every_pair() -> None:
    assert make_part("capacity", "none")(make_pairs(WANTED), 4, 2) is None


@pytest.mark.parametrize("options", [{"factor": 0}, {"eval_factor": -1}, {"min_capacity": -1}])
def test_nonsense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="^configuration: moe.router.capacity: .* must be "):
        moe_config(router={"capacity": {"name": "per_expert", **options}})
