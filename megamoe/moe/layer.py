"""The MoE layer."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.config import PartChoice
from megamoe.config.schema import Activation, MoEConfig
from megamoe.config.shapes import routed_experts, shared_ffn_size
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe.auxiliary_losses import AuxiliaryLosses
from megamoe.moe.context import LayerTrace
from megamoe.moe.dispatch.choice import build_dispatcher
from megamoe.moe.dispatch.dispatcher import DispatchConfig
from megamoe.moe.experts.computation import ExpertComputation
from megamoe.moe.experts.dropout import ExpertDropout
from megamoe.moe.experts.grouped import OWN_PRODUCTS, GroupedExperts, Products, Slice
from megamoe.moe.experts.latent import LatentProjection
from megamoe.moe.experts.shared import NoSharedExperts, SharedExperts
from megamoe.moe.experts.stack import ExpertStack, NormKind
from megamoe.moe.experts.without_computation import NoZeroExperts, ZeroExperts
from megamoe.moe.observation import Observation
from megamoe.moe.part import Constraint, Dims, Part, StepContext
from megamoe.moe.process_groups import ParallelGroups, rank_in, size_of
from megamoe.moe.router import Router
from megamoe.moe.routing import Routing
from megamoe.moe.stage_marks import mark_stages
from megamoe.moe.token_sharding import TokenSharding


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one MoE layer and how its weights are initialised.

    layer: the block's number, from 1. output_std: of the weights that write into the residual.
    init_scale: see `rng.init_weight`. width: of muP, see `config.mup`: hidden weights start with init_std /
    sqrt(width). vocab_size: rows of the embedding. norm, norm_eps: the model's, for
    experts that have norms of their own. products: the routed experts'. kernels: the model's choice.
    recomputed: what the backward pass computes again, see `model.recompute`. of_source: the layer is in
    the encoder of an encoder_decoder. exchange, exchange_fp8: see `parallel.exchange`, `exchange_dtype`.
    before: the layer whose scores the router's residual reads, see `config.layer_kinds.scores_before`.
    """

    hidden_size: int
    ffn_size: int
    layer: int
    activation: Activation
    init_std: float
    output_std: float
    seed: int
    init_scale: float | None = None
    width: float = 1.0
    vocab_size: int | None = None
    of_source: bool = False
    norm: NormKind = "rmsnorm"
    norm_eps: float = 1e-5
    products: Products = OWN_PRODUCTS
    kernels: Kernels = DEFAULT_KERNELS
    recomputed: frozenset[str] = frozenset()
    exchange: PartChoice | None = None
    exchange_fp8: bool = False
    before: int | None = None


class MoELayer(nn.Module):
    """Router, experts, shared experts and auxiliary losses of one block.

    Each forward pass replaces the layer's `trace` of the micro batch and never adds to it. While
    `recomputing` is set, it does not change: a block that activation recomputation computes twice is counted
    once, and an objective's value is not lost.
    """

    def __init__(
        self, config: MoEConfig, shape: LayerShape, context: StepContext, groups: ParallelGroups | None = None
    ) -> None:
        nn.Module.__init__(self)  # not super(): a subclass's second base may take other arguments
        groups = groups or ParallelGroups()
        self.context, self.groups = context, groups
        self.of_source = shape.of_source
        self.number, self.before = shape.layer, shape.before
        self.num_experts = config.num_experts
        self.token_sharding = TokenSharding(groups.tensor)
        self.router = Router(config.router, _dims(config, shape, groups), self.token_sharding)
        self.losses = AuxiliaryLosses(config.losses, self.router.dims)
        self.dispatcher = build_dispatcher(
            shape.exchange or PartChoice.default("exchange"),
            DispatchConfig(
                config.num_experts, groups, shape.kernels, shape.exchange_fp8, shape.products.host_counts
            ),
        )
        self.experts = _routed_experts(config, shape, _own_experts(config.num_experts, groups), groups)
        self.computation = ExpertComputation(
            self.experts,
            self.dispatcher,
            recomputes="moe" in shape.recomputed,
            weighs_inside=config.weights_in_activation,
            reads_counts=shape.products.host_counts,
        )
        self.dropout = config.expert_output_dropout, config.expert_activation_dropout
        self.shared = _shared_experts(config, shape)
        self.zero = _zero_experts(config, shape)
        self.to_latent, self.to_hidden = _latent_projections(config, shape)
        self.recomputing = False
        self.frozen = config.frozen
        for module in self.frozen:
            getattr(self, module).requires_grad_(False)
        for part in [module for module in self.modules() if isinstance(module, Part)]:
            part.attach(self)
        mark_stages(self)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Take this rank's tokens, [T, H]; return what the block adds to its residual, [T, H].

        The output's backward also carries the gradient of the auxiliary losses. Padding is not routed, and
        its output is 0.
        """
        context = self.context.of_source() if self.of_source else self.context
        return self.token_sharding.without_padding(self._compute, hidden_TH, context)

    def _compute(self, hidden_TH: Tensor, context: StepContext) -> Tensor:
        routing = self.router(hidden_TH, context, self._scores_before())
        computing, own, sent = self.zero.split(routing, context, self.token_sharding)
        state = self.dispatcher.start(self.to_latent(hidden_TH), sent)
        # Beside the exchange; in the backward pass too, because autograd runs nodes in reverse order.
        delayed = self.computation.delayed_gradients()
        shared_TH = self.shared(hidden_TH)
        rows_NH, counts_E = self.dispatcher.finish(state)
        dropout = self.expert_dropout(sent, state, context)
        rows_NH = self.computation(rows_NH, counts_E, state, dropout, delayed)
        output_TH = self.to_hidden(self.computation.combine(rows_NH, state))
        output_TH = self.zero(hidden_TH, own, output_TH)
        output_TH = self.shared.join(hidden_TH, shared_TH, output_TH)
        return self.losses(output_TH, routing, computing, self._new_trace(own), context)

    def _scores_before(self) -> Tensor | None:
        """Return this rank's scores in the layer that the residual reads, [T, E]; None without one."""
        return None if self.before is None else self.context.trace(self.before).scores_TE

    def _new_trace(self, own: Routing) -> LayerTrace:
        """Return the trace of this pass; the micro batch keeps it, unless the block is computed again."""
        trace = LayerTrace(scores_TE=own.scores_TE if self.router.residual.reads_before else None)
        if not self.recomputing:
            self.context.batch.traces[self.number] = trace
        return trace

    @property
    def observation(self) -> Observation | None:
        """The observation of the micro batch that the context describes; None before its pass."""
        return self.context.trace(self.number).observation

    @property
    def routing(self) -> Routing | None:
        """Its routing, kept for an objective, which needs the token losses."""
        return self.context.trace(self.number).routing

    def objective(self, token_losses_T: Tensor) -> Tensor:
        """Return the weighted sum of the objectives for the last forward pass, a scalar; token_losses_T:
        fp32.
        """
        return self.losses.objective(self.context.trace(self.number), token_losses_T, self.context)

    def expert_dropout(self, sent: Routing, state: Any, context: StepContext) -> ExpertDropout | None:
        """Return the dropout of the experts' rows in training, if a rate is set; row numbers travel with the
        rows.
        """
        output, activation = self.dropout
        if not self.training or output == activation == 0:
            return None
        index_T = self.token_sharding.local_context(context, sent.num_tokens).token_index(
            sent.num_tokens, sent.pairs.token_N.device
        )
        token_N = sent.pairs.token_N
        if sent.slots is not None:
            token_N = token_N.clamp(max=len(index_T) - 1)
        row_N = index_T[token_N] * self.num_experts + sent.pairs.expert_N
        draw_key = functools.partial(self.context.draw_key, self.number)
        row_N = self.dispatcher.dispatch_values(row_N, state)
        return ExpertDropout(output, activation, row_N, draw_key, self.router.dims.kernels)

    def after_step(self, load_E: Tensor) -> None:
        """Call the parts' `after_step`; load_E: int64, the pairs wanted in the whole batch."""
        for mask in self.router.masks:
            closed_E = mask.closed_E(self.context)
            if closed_E is not None:
                load_E = load_E.masked_fill(closed_E.to(load_E.device), -1)
        with torch.no_grad():
            for part in self._learning_parts:
                part.after_step(load_E, self.context)

    def parameters_after_step(self) -> list[nn.Parameter]:
        """The parameters that `after_step` may read: those of the parts that define it."""
        learning = [part for part in self._learning_parts if type(part).after_step is not Part.after_step]
        return [parameter for part in learning for parameter in part.parameters()]

    def measured_parts(self) -> dict[str, Part]:
        """Return the parts that declare metrics, by their names in the layer (`router.scorer`)."""
        return {name: part for name, part in self._parts.items() if type(part).metrics is not Part.metrics}

    def constraints(self) -> list[Constraint]:
        """Return the projections of all parts, see `Part.constraints`."""
        return [constraint for part in self._learning_parts for constraint in part.constraints()]

    @functools.cached_property
    def _parts(self) -> dict[str, Part]:
        """Its parts by their names in it, which do not change once it is built."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Part)}

    @functools.cached_property
    def _learning_parts(self) -> list[Part]:
        frozen = set(self.router.modules()) if "router" in self.frozen else set()
        return [part for part in self._parts.values() if part not in frozen]


def _dims(config: MoEConfig, shape: LayerShape, groups: ParallelGroups) -> Dims:
    return Dims(
        shape.hidden_size,
        routed_experts(config),
        shape.layer,
        shape.init_std,
        shape.init_scale,
        shape.seed,
        shape.vocab_size,
        expert_parallel=size_of(groups.expert),
        follows_data=groups.follows_data,
        num_zero=config.zero_experts.total,
        kernels=shape.kernels,
        width=shape.width,
    )


def _own_experts(num_experts: int, groups: ParallelGroups) -> range:
    """Return the global numbers of the experts that this rank holds."""
    ranks = size_of(groups.expert)
    if num_experts % ranks:
        raise ValueError(f"{num_experts} experts do not divide over {ranks} expert-parallel ranks")
    size = num_experts // ranks
    first = rank_in(groups.expert) * size
    return range(first, first + size)


def _routed_experts(
    config: MoEConfig, shape: LayerShape, expert_ids: range, groups: ParallelGroups
) -> GroupedExperts | ExpertStack:
    sizes = config.latent_size or shape.hidden_size, shape.ffn_size, expert_ids
    cut = Slice(rank_in(groups.expert_tensor), size_of(groups.expert_tensor))
    options = {"bias": config.expert_bias, "products": shape.products, **_expert_options(shape)}
    if config.expert_sublayers == 1:
        return GroupedExperts(*sizes, cut=cut, **options)
    if cut.count > 1:
        raise ValueError("experts of several sub-layers cannot be cut: a norm stands between the slices")
    return ExpertStack(config.expert_sublayers, *sizes, norm=shape.norm, norm_eps=shape.norm_eps, **options)


def _shared_experts(config: MoEConfig, shape: LayerShape) -> SharedExperts | NoSharedExperts:
    if config.num_shared_experts == 0:
        return NoSharedExperts()
    size = shared_ffn_size(config, shape.ffn_size)
    mix_std, options = shape.init_std / shape.width, _expert_options(shape)
    return SharedExperts(shape.hidden_size, size, mode=config.shared_expert_mode, mix_std=mix_std, **options)


def _zero_experts(config: MoEConfig, shape: LayerShape) -> ZeroExperts | NoZeroExperts:
    if config.zero_experts.total == 0:
        return NoZeroExperts()
    return ZeroExperts(
        config.zero_experts,
        config.num_experts,
        shape.hidden_size,
        std=shape.init_std,
        mix_std=shape.init_std / shape.width,
        init_scale=shape.init_scale,
        seed=shape.seed,
        layer=shape.layer,
    )


def _latent_projections(config: MoEConfig, shape: LayerShape) -> tuple[nn.Module, nn.Module]:
    """Return the projections to the experts' space and back; identities where they compute hidden states."""
    if config.latent_size is None:
        return nn.Identity(), nn.Identity()
    hidden, latent = shape.hidden_size, config.latent_size
    options: dict[str, Any] = {"init_scale": shape.init_scale, "seed": shape.seed, "layer": shape.layer}
    std = shape.init_std / math.sqrt(shape.width)
    to_latent = LatentProjection(latent, hidden, name="to latent", std=std, **options)
    return to_latent, LatentProjection(hidden, latent, name="to hidden", std=shape.output_std, **options)


def _expert_options(shape: LayerShape) -> dict[str, Any]:
    """Return the options that routed and shared experts share: the activation and the initialisation."""
    return {
        "activation": shape.activation,
        "std": shape.init_std / math.sqrt(shape.width),
        "output_std": shape.output_std,
        "init_scale": shape.init_scale,
        "seed": shape.seed,
        "layer": shape.layer,
        "kernels": shape.kernels,
        "recomputed": shape.recomputed,
    }
