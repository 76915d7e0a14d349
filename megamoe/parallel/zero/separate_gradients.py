"""The gradients of two micro batches whose graphs one backward pass goes through.

Autograd would sum both gradients before it gives them to a parameter: in bf16, although two backward passes
would sum them in fp32, and in another order where a weight is used twice. So each forward pass gets its own
leaf tensors, which share the parameters' memory. When both gradients of a parameter have arrived, they are
delivered one after the other, as from two backward passes.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.compat.torch_compat import read_parameters_by, set_node_number
from megamoe.kernels.autograd import Function


class SeparateGradients:
    """Gives the forward passes of `module` stand-ins of its parameters.

    deliver: called in the backward pass with a parameter and its gradients, in the order of the passes, as
    soon as all are there. A gradient arrives at the latest when the rest of the backward pass is over.
    """

    def __init__(self, module: nn.Module, deliver: Callable[[nn.Parameter, list[Tensor]], None]) -> None:
        self._deliver = deliver
        self._passes = _OwnPass()
        self._uses: dict[nn.Parameter, int] = {}
        self._arrived: dict[nn.Parameter, dict[int, Tensor]] = {}
        read_parameters_by(module, self._passes.read)

    @contextmanager
    def of(self, place: int) -> Iterator[None]:
        """Context of the forward pass `place` in this thread."""
        stand_ins: dict[nn.Parameter, Tensor] = {}

        def stand_in(parameter: nn.Parameter) -> Tensor:
            if not (parameter.requires_grad and torch.is_grad_enabled()):
                return parameter
            if parameter not in stand_ins:
                self._uses[parameter] = self._uses.get(parameter, 0) + 1
                leaf = parameter.detach().requires_grad_()
                leaf.register_post_accumulate_grad_hook(lambda leaf: self._take(parameter, place, leaf))
                stand_ins[parameter] = leaf
            return stand_ins[parameter]

        self._passes.stand_in = stand_in
        try:
            yield
        finally:
            self._passes.stand_in = None

    def _take(self, parameter: nn.Parameter, place: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        arrived = self._arrived.setdefault(parameter, {})
        arrived[place] = gradient
        if len(arrived) == self._uses[parameter]:
            self._give(parameter)

    def _give(self, parameter: nn.Parameter) -> None:
        arrived = self._arrived.pop(parameter)
        self._deliver(parameter, [arrived[place] for place in sorted(arrived)])

    def joined(self, losses: list[Tensor]) -> Tensor:
        """Return the loss whose backward pass goes through the graphs of all passes."""
        end: Tensor = _End.apply(losses[0].detach().new_zeros(()).requires_grad_(), self._finish)
        assert end.grad_fn is not None
        set_node_number(end.grad_fn, 0)  # after all other nodes
        return torch.stack([*losses, end]).sum()

    def _finish(self) -> None:
        """Deliver what has no counterpart, because the other pass used a parameter without a gradient."""
        for parameter in list(self._arrived):
            self._give(parameter)
        self._uses.clear()


class _OwnPass(threading.local):
    """This thread's pass: a parameter's stand-in in it; None: no pass."""

    stand_in: Callable[[nn.Parameter], Tensor] | None = None

    def read(self, parameter: nn.Parameter) -> Tensor:
        return parameter if self.stand_in is None else self.stand_in(parameter)


class _End(Function):
    @staticmethod
    def forward(ctx: Any, zero: Tensor, finish: Callable[[], None]) -> Tensor:
        ctx.finish = finish
        return zero.view_as(zero)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.finish()
        return None, None
