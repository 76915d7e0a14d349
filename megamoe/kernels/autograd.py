"""What the passes share as functions of autograd."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


class Function(torch.autograd.Function):
    """A function of autograd without functorch's transforms (vmap, grad), which nothing here uses.

    PyTorch's `apply` looks for one, and through all arguments for wrappers that one left: 3 us in a call.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """See `torch.autograd.Function`; without keywords."""
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `backward` as PyTorch's decorator of this name does: a second derivative is an error.

    PyTorch's enters a context in each call. Without a second derivative gradients are off in a backward pass,
    the context changes nothing, and it is left out: 150 calls in a step of 12 layers.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def called(ctx: Any, *gradients: Any) -> Any:
        return checked(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return called
