"""Auxiliary losses whose gradient begins in the MoE layer, so that the model does not return them."""

import functools
from typing import Any

import numpy
import torch
from torch import Tensor

from megamoe.kernels.autograd import Function
from megamoe.moe.context import StepContext


def attach_losses(
    output: Tensor, values: dict[str, Tensor], weights: dict[str, float], context: StepContext
) -> Tensor:
    """Return `output` unchanged; its backward pass gives each loss the gradient `aux_scale` times its weight.

    The model thus does not have to return the losses, and their gradients are right when the block is
    recomputed. The training loop sets `context.aux_scale`, so that the gradients over ranks and accumulated
    micro batches are those of the mean of the losses.
    """
    attached: Tensor = _AttachLosses.apply(
        output, [weights[name] for name in values], context, *values.values()
    )
    return attached


class _AttachLosses(Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, weights: list[float], context: StepContext, *values: Tensor
    ) -> Tensor:
        ctx.context, ctx.weights = context, weights
        ctx.kinds = [(value.dtype, value.device) for value in values]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = ctx.context.aux_scale
        sent = [
            device_scalar(scale, weight, *kind) for weight, kind in zip(ctx.weights, ctx.kinds, strict=True)
        ]
        return gradients[0], None, None, *sent


@functools.lru_cache(maxsize=64)
def device_scalar(scale: float, weight: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return scale * weight as a product of numbers of that dtype, on the device; shared by all layers."""
    product = (
        float(numpy.float32(scale) * numpy.float32(weight)) if dtype == torch.float32 else scale * weight
    )
    # Not torch.tensor, whose copy to a GPU the host waits for.
    return torch.full((), product, dtype=dtype, device=device)
