"""Functions of autograd: the gradients of PyTorch's, and an error for a second derivative."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.autograd import Function, once_differentiable


class Cube(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return gradient * 3 * values**2


def test_the_gradient_is_the_derivative() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    Cube.apply(values).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [3.0, 12.0]


class Plain(torch.autograd.Function):
    forward = staticmethod(Cube.forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return gradient * 3 * values**2


@pytest.mark.parametrize("function", [Cube, Plain])
def test_a_second_derivative_is_an_error(function: Any) -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    sent = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad(function.apply(values), values, sent, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
