"""Declares hand-written GPU kernels as PyTorch operators, with what they cost.

PyTorch knows the operators that come with it: it can run them on fake tensors, which have a shape and no
data, and it counts their FLOPs. A launch of a Triton kernel is invisible to it. Declared here, the launch is
an operator `megamoe::NAME` with a fake implementation and a `KernelCost`, and `megamoe.apps.plan` counts it.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from megamoe.compat.torch_compat import watches_operators

# Each gets the operator's arguments, by position and name, and its result as the keyword `result`.
Formula = Callable[..., int]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class KernelCost:
    """What one call of an operator costs.

    bytes_moved: bytes read and written in the device's memory, or None: every tensor argument and result
    once. flops: floating-point operations of matrix products, or None: 0.
    launches: kernels that one call launches.
    """

    bytes_moved: Formula | None = None
    flops: Formula | None = None
    launches: int = 1


# An operator of `torch.library.custom_op` costs the host 30 to 80 us a call, one of this library 3.
_library = torch.library.Library("megamoe", "FRAGMENT")
_costs: dict[str, KernelCost] = {}


def cost_of(name: str) -> KernelCost | None:
    """Return the cost of the operator `namespace::name`, or None if it was not declared here."""
    return _costs.get(name)


def kernel_operator(
    name: str,
    *,
    fake: Callable[..., Any] | None = None,
    mutates: Iterable[str] = (),
    bytes_moved: Formula | None = None,
    flops: Formula | None = None,
    launches: int = 1,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that launches kernels: it becomes the operator `megamoe::NAME`.

    The function's arguments and result need type hints that `torch.library.infer_schema` knows: Tensor,
    Tensor | None, list[Tensor], int, float, bool, str; a result that is one of its arguments is not allowed.
    It has no gradient, and PyTorch does not count its writes as changes of saved tensors: call it inside a
    torch.autograd.Function. Where nothing watches operators, it is called without the dispatcher. fake: the
    same arguments to empty results of the right shapes and dtypes; None where the function returns nothing
    and writes into its arguments.
    mutates: the arguments that it writes. The rest: see `KernelCost`.
    """

    def declare(launch: Callable[..., Any]) -> Any:
        _library.define(name + torch.library.infer_schema(launch, mutates_args=set(mutates)))
        _library.impl(name, launch, "CompositeExplicitAutograd")
        shapes = fake or (lambda *arguments, **keywords: None)
        torch.library.register_fake(f"megamoe::{name}", shapes, lib=_library)
        _costs[f"megamoe::{name}"] = KernelCost(bytes_moved, flops, launches)
        operator = getattr(torch.ops.megamoe, name).default

        @functools.wraps(launch)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return (operator if watches_operators() else launch)(*arguments, **keywords)

        return call

    return declare
