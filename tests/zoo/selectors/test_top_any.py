"""top_any: thresholds that are learned, and a straight-through gradient."""

import torch

from megamoe.moe.part import StepContext
from tests.support.moe.build import gradient_of, make_part, make_scored

PROBS = torch.tensor([[0.9, 0.6, 0.2], [0.3, 0.4, 0.1]])


def test_by_hand() -> None:
    """Thresholds of 1/2: two experts of weight 1/2, and the best alone where none exceeds it."""
    pairs = make_part("selector", "top_any", 3)(make_scored(PROBS, PROBS), StepContext())
    assert pairs.token_N.tolist() == [0, 0, 1] and pairs.expert_N.tolist() == [0, 1, 1]
    assert pairs.weight_N.tolist() == [0.5, 0.5, 1.0]
    low = make_part("selector", "top_any", 3, start=0.15)(make_scored(PROBS, PROBS), StepContext())
    assert low.expert_N.tolist() == [0, 1, 2, 1, 0]


def test_the_gradient_goes_straight_through_to_p_and_thresholds() -> None:
    """dw/dp is 1/m, dw/dG is -sigmoid'(0)/m = -1/(4m) of each pair."""
    selector, probs_TE = make_part("selector", "top_any", 3), PROBS.clone().requires_grad_()
    pairs = selector(make_scored(PROBS, probs_TE), StepContext())
    (pairs.weight_N * torch.tensor([1.0, 2.0, 8.0])).sum().backward()
    assert gradient_of(probs_TE).tolist() == [[0.5, 1.0, 0.0], [0.0, 8.0, 0.0]]
    torch.testing.assert_close(gradient_of(selector.threshold), torch.tensor([-0.125, -2.25, 0.0]))
