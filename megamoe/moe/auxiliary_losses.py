"""Auxiliary losses whose gradient begins in the MoE layer, so that the model does not return them."""

import functools
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from megamoe.config import PartChoice
from megamoe.kernels.autograd import Function
from megamoe.moe.context import LayerTrace, StepContext
from megamoe.moe.objective import Objective
from megamoe.moe.observation import observe
from megamoe.moe.part import Dims
from megamoe.moe.router import build_part
from megamoe.moe.routing import Routing


class AuxiliaryLosses(nn.ModuleDict):
    """The losses of one MoE layer by their names in the configuration.

    weights: of each loss in the total loss. objectives: the losses that need the model's token losses, which
    `objective` computes after the model's forward pass.
    """

    def __init__(self, choices: dict[str, PartChoice], dims: Dims) -> None:
        super().__init__({name: build_part(choice, dims) for name, choice in choices.items()})
        self.dims = dims
        self.weights = {name: float(choice.options.weight) for name, choice in choices.items()}
        self.objectives: dict[str, Any] = {n: loss for n, loss in self.items() if isinstance(loss, Objective)}

    def forward(
        self, output_TH: Tensor, routing: Routing, computing: Routing, trace: LayerTrace, context: StepContext
    ) -> Tensor:
        """Return the layer's output, whose backward pass also gives the losses their gradients, [T, H].

        It fills in the trace. computing: the routing to the experts that compute.
        """
        others = [(name, loss) for name, loss in self.items() if name not in self.objectives]
        values = {name: loss(routing, context) for name, loss in others}
        detached = {name: value.detach() for name, value in values.items()}
        trace.observation = observe(routing, detached, self.dims.kernels, computing)
        trace.routing = routing if self.objectives else None
        if not values or not self.training:
            return output_TH
        return attach_losses(output_TH, values, self.weights, context)

    def objective(self, trace: LayerTrace, token_losses_T: Tensor, context: StepContext) -> Tensor:
        """Return the weighted sum of the objectives, a scalar; token_losses_T: fp32."""
        routing, token_losses_T = trace.routing, token_losses_T.detach()
        values = {name: loss(routing, context, token_losses_T) for name, loss in self.objectives.items()}
        trace.observation.losses |= {name: value.detach() for name, value in values.items()}
        trace.routing = None
        return torch.stack([value * self.weights[name] for name, value in values.items()]).sum()


def attach_losses(
    output: Tensor, values: dict[str, Tensor], weights: dict[str, float], context: StepContext
) -> Tensor:
    """Return `output` unchanged; its backward pass gives each loss the gradient `aux_scale` times its weight.

    The model thus does not have to return the losses, and their gradients are right when the block is
    recomputed. The training loop sets `context.aux_scale`, so that the gradients over ranks and accumulated
    micro batches are those of the mean of the losses.
    """
    return _AttachLosses.apply(output, [weights[name] for name in values], context, *values.values())


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
