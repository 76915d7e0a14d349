"""Gates: scores to values p, with and without restricted experts."""

import math
from typing import Any

import pytest
import torch

from tests.moe.build import make_part

SCORES = torch.tensor([[0.0, math.log(2), math.log(3), math.log(4)]])
SOME = torch.tensor([[True, False, True, False]])
NONE = torch.zeros(1, 4, dtype=torch.bool)


def test_softmax() -> None:
    probs_TE = make_part("score_function", "softmax")(SCORES, None)
    torch.testing.assert_close(probs_TE, torch.tensor([[0.1, 0.2, 0.3, 0.4]]))


def test_softmax_with_temperature() -> None:
    probs_TE = make_part("score_function", "softmax", temperature=0.5)(SCORES, None)
    torch.testing.assert_close(probs_TE, torch.tensor([[1, 4, 9, 16]]) / 30)


def test_softmax_of_the_candidates() -> None:
    probs_TE = make_part("score_function", "softmax")(SCORES, SOME)
    torch.testing.assert_close(probs_TE, torch.tensor([[0.25, 0, 0.75, 0]]))
    assert probs_TE[0, 1] == 0 and probs_TE[0, 3] == 0


def test_sigmoid() -> None:
    probs_TE = make_part("score_function", "sigmoid")(SCORES, None)
    torch.testing.assert_close(probs_TE, torch.tensor([[1 / 2, 2 / 3, 3 / 4, 4 / 5]]))


def test_sigmoid_with_temperature_and_candidates() -> None:
    probs_TE = make_part("score_function", "sigmoid", temperature=0.5)(SCORES, SOME)
    torch.testing.assert_close(probs_TE, torch.tensor([[1 / 2, 0, 9 / 10, 0]]))
    assert probs_TE[0, 1] == 0 and probs_TE[0, 3] == 0


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("candidates_TE", [SOME, NONE], ids=["some", "none"])
def test_a_restricted_expert_gets_no_gradient(score_function: str, candidates_TE: torch.Tensor) -> None:
    scores_TE = SCORES.clone().requires_grad_()
    probs_TE = make_part("score_function", score_function)(scores_TE, candidates_TE)
    (probs_TE * torch.arange(1.0, 5.0)).sum().backward()
    assert torch.equal(probs_TE != 0, candidates_TE)
    assert scores_TE.grad is not None
    assert torch.equal(scores_TE.grad != 0, candidates_TE)


def test_softmax_over_all_experts_masks_the_choice_alone() -> None:
    part = make_part("score_function", "softmax", over="all")
    torch.testing.assert_close(part(SCORES, None), torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    torch.testing.assert_close(part(SCORES, SOME), torch.tensor([[0.1, 0, 0.3, 0]]))
    assert not part(SCORES, NONE).any()


def test_softmax_over_all_experts_sends_gradient_to_all() -> None:
    """dp_0/ds = p_0 (delta - p), of the softmax over all four experts."""
    scores_TE = SCORES.clone().requires_grad_()
    make_part("score_function", "softmax", over="all")(scores_TE, SOME)[0, 0].backward()
    torch.testing.assert_close(scores_TE.grad, torch.tensor([[0.09, -0.02, -0.03, -0.04]]))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("score_function", "options"), [("softmax", {}), ("softmax", {"over": "all"}), ("sigmoid", {})]
)
def test_log_values_are_the_logarithms_of_p_up_to_a_constant(
    score_function: str, options: dict[str, Any], temperature: float
) -> None:
    part = make_part("score_function", score_function, temperature=temperature, **options)
    difference_TE = part(SCORES, None).log() - part.log_values(SCORES)
    torch.testing.assert_close(difference_TE, difference_TE[:, :1].expand(1, 4))
    if part.elementwise:
        torch.testing.assert_close(difference_TE, torch.zeros(1, 4))
