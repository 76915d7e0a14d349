"""The MoE layer. Its forward reads like the paper."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.config.schema import MoEConfig
from megamoe.moe.dispatch import AllToAllDispatch, LocalDispatch, Plan
from megamoe.moe.experts import Activation, GroupedExperts, SharedExperts
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.router import Router, build_part
from megamoe.moe.routing import Routing


class Dispatch(Protocol):
    """Moves rows to their experts and back."""

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Plan]: ...

    def combine(self, rows_NH: Tensor, plan: Plan) -> Tensor: ...


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one MoE layer and how its weights start.

    layer: the block's number, from 1. output_std: of the weights that write into the residual.
    """

    hidden_size: int
    ffn_size: int
    layer: int
    activation: Activation
    init_std: float
    output_std: float
    seed: int


@dataclass
class Observation:
    """What one forward pass showed, without gradient: int64 counts and the losses by name."""

    load_E: Tensor
    wanted_E: Tensor
    losses: dict[str, Tensor]


class MoELayer(nn.Module):
    """Router, experts, shared experts and auxiliary losses of one block.

    Each forward replaces `observation` (never adds to it): a block that is computed twice, under
    activation recomputation, is still counted once.
    """

    def __init__(
        self,
        config: MoEConfig,
        shape: LayerShape,
        context: StepContext,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        nn.Module.__init__(self)  # by name: a subclass may have a second base with other arguments
        self.context = context
        self.num_experts = config.num_experts
        dims = Dims(shape.hidden_size, config.num_experts, shape.layer, shape.init_std, shape.seed)
        self.router = Router(config.router, dims)
        self.losses = nn.ModuleDict(
            {name: build_part(choice, dims) for name, choice in config.losses.items()}
        )
        self.loss_weights = {name: float(choice.options.weight) for name, choice in config.losses.items()}
        self.dispatcher, expert_ids = _place_experts(config.num_experts, group)
        self.experts = GroupedExperts(
            shape.hidden_size,
            shape.ffn_size,
            expert_ids,
            activation=shape.activation,
            std=shape.init_std,
            output_std=shape.output_std,
            seed=shape.seed,
            layer=shape.layer,
        )
        self.shared = _shared_experts(config, shape)
        self.observation: Observation | None = None

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H], what the block adds to its residual; carries the auxiliary gradient."""
        routing = self.router(hidden_TH, self.context)
        rows_NH, counts_E, plan = self.dispatcher.dispatch(hidden_TH, routing)
        rows_NH = self.experts(rows_NH, counts_E)
        output_TH = self.dispatcher.combine(rows_NH, plan)
        if self.shared is not None:
            output_TH = output_TH + self.shared(hidden_TH)
        return self._with_losses(output_TH, routing)

    def _with_losses(self, output_TH: Tensor, routing: Routing) -> Tensor:
        values = {name: loss(routing) for name, loss in self.losses.items()}
        self.observation = Observation(
            routing.counts_E(),
            routing.wanted_counts_E(),
            {name: value.detach() for name, value in values.items()},
        )
        if not values or not self.training:
            return output_TH
        total = torch.stack([value * self.loss_weights[name] for name, value in values.items()]).sum()
        return attach_loss(output_TH, total, self.context)


def attach_loss(output: Tensor, loss: Tensor, context: StepContext) -> Tensor:
    """`output` unchanged, but its backward also sends `context.aux_scale` into `loss`.

    The loss thus needs no road of its own out of the model, and comes out right when the block is
    recomputed. The scale is the training loop's: it makes the sum over ranks and accumulated micro
    batches their mean, whatever the engine divides by.
    """
    return _AttachLoss.apply(output, loss, context)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, context: StepContext) -> Tensor:
        ctx.context, ctx.loss_dtype, ctx.loss_device = context, loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = torch.tensor(ctx.context.aux_scale, dtype=ctx.loss_dtype, device=ctx.loss_device)
        return gradients[0], scale, None


def _place_experts(num_experts: int, group: dist.ProcessGroup | None) -> tuple[Dispatch, range]:
    """The dispatch, and the global numbers of the experts that this rank holds."""
    if group is None or dist.get_world_size(group) == 1:
        return LocalDispatch(), range(num_experts)
    ranks = dist.get_world_size(group)
    if num_experts % ranks:
        raise ValueError(f"{num_experts} experts do not divide over {ranks} expert-parallel ranks")
    size = num_experts // ranks
    first = dist.get_rank(group) * size
    return AllToAllDispatch(group), range(first, first + size)


def _shared_experts(config: MoEConfig, shape: LayerShape) -> SharedExperts | None:
    if config.num_shared_experts == 0:
        return None
    return SharedExperts(
        shape.hidden_size,
        config.num_shared_experts * shape.ffn_size,
        activation=shape.activation,
        gate=config.shared_expert_gate,
        std=shape.init_std,
        output_std=shape.output_std,
        seed=shape.seed,
        layer=shape.layer,
    )
