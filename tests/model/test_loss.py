"""The loss of each token against the definition of cross entropy, smoothed or not, on one rank."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.model.loss import token_losses

S, B, V = 3, 2, 7


def by_definition(logits_SBV: Tensor, labels_SB: Tensor, smoothing: float) -> Tensor:
    """-sum_v t_v log p_v with t = 1 - a at the label and a / (V - 1) at each other word."""
    target_SBV = torch.full_like(logits_SBV, smoothing / (V - 1))
    target_SBV = target_SBV.scatter(-1, labels_SB[..., None], 1 - smoothing)
    return -(target_SBV * logits_SBV.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_values_and_gradients(one_rank: None, smoothing: float) -> None:
    torch.manual_seed(0)
    logits_SBV = (torch.randn(S, B, V) * 3).requires_grad_()
    labels_SB = torch.randint(0, V, (S, B))
    upstream_SB = torch.randn(S, B)
    # It may write into what it is given: not into a leaf.
    losses_SB = token_losses(logits_SBV * 1, labels_SB, smoothing)
    expected_SB = by_definition(logits_SBV, labels_SB, smoothing)
    torch.testing.assert_close(losses_SB, expected_SB, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(it, logits_SBV, upstream_SB)[0] for it in (losses_SB, expected_SB)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    if smoothing == 0:
        plain_SB = functional.cross_entropy(logits_SBV.flatten(0, 1), labels_SB.flatten(), reduction="none")
        torch.testing.assert_close(losses_SB.flatten(), plain_SB)


def test_smoothing_keeps_to_the_other_words(one_rank: None) -> None:
    """If the whole target is distributed, the label's own logit decreases."""
    logits_SBV = torch.zeros(1, 1, V, requires_grad=True)
    token_losses(logits_SBV * 1, torch.tensor([[2]]), 1.0).sum().backward()
    expected = torch.full((V,), 1 / V - 1 / (V - 1))
    expected[2] = 1 / V
    assert logits_SBV.grad is not None
    torch.testing.assert_close(logits_SBV.grad[0, 0], expected)
