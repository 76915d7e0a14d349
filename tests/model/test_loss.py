"""The loss of each token against the definition of cross entropy, smoothed or not, on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe.kernels import cross_entropy
from megamoe.kernels.choice import DEFAULT_KERNELS
from megamoe.model.heads.vocabulary import narrow_token_losses, token_losses, whole_token_losses

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
    losses_SB = token_losses(logits_SBV * 1, labels_SB, smoothing, DEFAULT_KERNELS)
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
    token_losses(logits_SBV * 1, torch.tensor([[2]]), 1.0, DEFAULT_KERNELS).sum().backward()
    expected = torch.full((V,), 1 / V - 1 / (V - 1))
    expected[2] = 1 / V
    assert logits_SBV.grad is not None
    torch.testing.assert_close(logits_SBV.grad[0, 0], expected)


@pytest.mark.parametrize("chunk", [1, 2 * V, 2**22])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_narrow_losses_are_the_whole_ones(
    one_rank: None, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 to its rounding; in bf16 the gradient is that of the same logits in fp32, rounded once."""
    monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
    torch.manual_seed(0)
    labels_SB, upstream_SB = torch.randint(0, V, (S, B)), torch.randn(S, B)
    for dtype in (torch.float32, torch.bfloat16):
        logits_SBV = (torch.randn(S, B, V) * 8 + 30).to(dtype).requires_grad_()
        wide_SBV = logits_SBV.detach().float().requires_grad_()
        narrow_SB = narrow_token_losses(logits_SBV * 1, labels_SB, smoothing, DEFAULT_KERNELS)
        whole_SB = whole_token_losses(wide_SBV * 1, labels_SB, smoothing)
        assert narrow_SB.dtype == torch.float32
        torch.testing.assert_close(narrow_SB, whole_SB, rtol=2e-6, atol=4e-6)
        (found_SBV,) = torch.autograd.grad(narrow_SB, logits_SBV, upstream_SB)
        (expected_SBV,) = torch.autograd.grad(whole_SB, wide_SBV, upstream_SB)
        assert found_SBV.dtype == dtype
        rounding = 2e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found_SBV.float(), expected_SBV, rtol=rounding, atol=1e-6)


def test_the_gradient_takes_the_memory_of_the_logits(one_rank: None) -> None:
    logits_SBV = torch.randn(S, B, V).bfloat16()
    labels_SB = torch.randint(0, V, (S, B))
    leaf_SBV = logits_SBV.clone().requires_grad_()
    taken_SBV = leaf_SBV * 1
    losses_SB = narrow_token_losses(taken_SBV, labels_SB, 0.0, DEFAULT_KERNELS)
    addresses: list[int] = []
    taken_SBV.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    losses_SB.sum().backward(retain_graph=True)
    assert addresses == [taken_SBV.data_ptr()]
    with pytest.raises(RuntimeError, match="can run once"):
        losses_SB.sum().backward()


def test_no_tensor_of_the_logits_shape_is_in_fp32(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever operators make, forward and backward, is a chunk at most."""
    monkeypatch.setattr(cross_entropy, "CHUNK", V)
    largest: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            wide = isinstance(made, Tensor) and made.dtype == torch.float32
            largest.append(made.numel() if wide else 0)
            return made

    leaf_SBV = torch.randn(S, B, V).bfloat16().requires_grad_()
    with Sizes():
        losses_SB = narrow_token_losses(
            leaf_SBV * 1, torch.zeros(S, B, dtype=torch.int64), 0.1, DEFAULT_KERNELS
        )
        losses_SB.sum().backward()
    assert max(largest) < S * B * V // 2
