"""The MoE layer."""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.config import PartChoice
from megamoe.config.schema import Activation, MoEConfig
from megamoe.config.shapes import routed_experts, shared_ffn_size
from megamoe.errors import UserError
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe import checked
from megamoe.moe.attached_losses import attach_losses
from megamoe.moe.dispatch.choice import build_dispatcher
from megamoe.moe.dispatch.dispatcher import ExpertPlaces, LocalDispatch
from megamoe.moe.expert_losses import ActivationLoss, OutputLoss, one_row_each, weighted_sum
from megamoe.moe.experts.dropout import ExpertDropout
from megamoe.moe.experts.grouped import OWN_PRODUCTS, GroupedExperts, Products, Slice
from megamoe.moe.experts.latent import LatentProjection
from megamoe.moe.experts.shared import SharedExperts
from megamoe.moe.experts.stack import ExpertStack, NormKind
from megamoe.moe.experts.without_computation import ZeroExperts
from megamoe.moe.objective import Objective
from megamoe.moe.observation import Observation, kept_to_measure, measure_gradients, observe
from megamoe.moe.part import Constraint, Dims, Part, StepContext
from megamoe.moe.process_groups import ParallelGroups, rank_in, size_of
from megamoe.moe.recompute import recomputed
from megamoe.moe.router import Router, build_part
from megamoe.moe.routing import Routing
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
    before: the layer whose scores the router's residual reads, see `config.groups.scores_before`.
    before_losses: the layer whose scores its losses read. keeps_scores: later layers read its scores.
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
    before_losses: int | None = None
    keeps_scores: bool = False


class MoELayer(nn.Module):
    """Router, experts, shared experts and auxiliary losses of one block.

    Each forward pass replaces `observation` and never adds to it. While `recomputing` is set, `observation`
    and `routing` do not change: a block that activation recomputation computes twice is counted once, and an
    objective's value is not lost.
    """

    def __init__(
        self,
        config: MoEConfig,
        shape: LayerShape,
        context: StepContext,
        groups: ParallelGroups | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not super(): a subclass's second base may take other arguments
        groups = groups or ParallelGroups()
        self.context = context
        self.of_source = shape.of_source
        self.before, self.before_losses = shape.before, shape.before_losses
        self.num_experts = config.num_experts
        self.token_sharding = TokenSharding(groups.tensor)
        self.expert_ranks = TokenSharding(groups.expert)
        self.slice_ranks = TokenSharding(groups.expert_tensor)
        self.router = Router(config.router, _dims(config, shape, groups), self.token_sharding)
        self.keeps_scores = shape.keeps_scores or self.router.residual.reads_before
        self.losses = nn.ModuleDict(
            {name: build_part(choice, self.router.dims) for name, choice in config.losses.items()}
        )
        self.loss_weights = {name: float(choice.options.weight) for name, choice in config.losses.items()}
        expert_ids = _own_experts(config.num_experts, groups)
        self.dispatcher = build_dispatcher(
            shape.exchange or PartChoice.default("exchange"),
            ExpertPlaces(
                config.num_experts, groups, shape.kernels, shape.exchange_fp8, shape.products.host_counts
            ),
        )
        self.reads_counts = shape.products.host_counts
        self.sends_rows = not isinstance(self.dispatcher, LocalDispatch)
        self.experts = _routed_experts(config, shape, expert_ids, groups)
        self.computes_experts_again = "moe" in shape.recomputed
        self.weighs_inside = config.weights_in_activation
        if self.weighs_inside and not self.dispatcher.moves_weights:
            raise UserError(
                f"moe.weights_in_activation: the exchange {type(self.dispatcher).__name__} does not send the "
                "weights to the experts; set it to false, or parallel.exchange to direct or by_node"
            )
        self.dropout = config.expert_output_dropout, config.expert_activation_dropout
        self.shared = _shared_experts(config, shape)
        self.zero = _zero_experts(config, shape)
        self.to_latent, self.to_hidden = _latent_projections(config, shape)
        self.recomputing = False
        self.frozen = config.frozen
        for module in self.frozen:
            getattr(self, module).requires_grad_(False)

    @property
    def observation(self) -> Observation | None:
        """The observation of the micro batch that the context describes; None before its pass."""
        return self.context.observations.get(id(self))

    @observation.setter
    def observation(self, observation: Observation | None) -> None:
        self.context.observations[id(self)] = observation

    @property
    def output_losses(self) -> list[OutputLoss]:
        """The losses that need the experts' outputs."""
        return [loss for loss in self.losses.values() if isinstance(loss, OutputLoss)]

    @property
    def routing(self) -> Routing | None:
        """Its routing, kept for an objective, which needs the token losses."""
        return self.context.routings.get(id(self))

    @routing.setter
    def routing(self, routing: Routing | None) -> None:
        self.context.routings[id(self)] = routing

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Take this rank's tokens, [T, H]; return what the block adds to its residual, [T, H].

        The output's backward also carries the gradient of the auxiliary losses. Padding is not routed, and
        its output is 0.
        """
        context = self.context.of_source() if self.of_source else self.context
        padding = context.padding
        if padding is None:
            return self._compute(hidden_TH, context)
        place_V = padding.own_places(self.token_sharding.rank, self.token_sharding.size)
        output_VH = self._compute(hidden_TH[place_V], padding.without(context, self.token_sharding.size))
        return output_VH.new_zeros(hidden_TH.shape).index_copy(0, place_V, output_VH)

    def _compute(self, hidden_TH: Tensor, context: StepContext) -> Tensor:
        with self._stage("route"):
            before_TE = None if self.before is None else self.context.scores[self.before]
            routing = self.router(hidden_TH, context, before_TE)
            own = computed = self.token_sharding.local_shard(routing, context)
            if self.keeps_scores and not self.recomputing:
                self.context.scores[self.router.dims.layer] = own.scores_TE
            real = routing
            if self.zero is not None:
                real = routing.of_first_experts(self.num_experts)
                computed = self.token_sharding.local_shard(real, context)
        self.context.compute_timer.pause()
        if own.places is not None and self.sends_rows and context.bounds is not None:
            raise UserError(
                "moe.router.capacity.pad: the micro batches have padding, so that the ranks would not send "
                "each other as many rows; set it to false"
            )
        with self._stage("dispatch"):
            rows_TH = hidden_TH if self.to_latent is None else self.to_latent(hidden_TH)
            sent = computed
            if self.output_losses:
                rows_TH, sent = one_row_each(rows_TH, computed)
            state = self.dispatcher.start(rows_TH, sent)
        self.context.compute_timer.resume()
        # Beside the exchange; in the backward pass too, because autograd runs nodes in reverse order.
        later = self._put_off_gradients()
        shared_TH = None if self.shared is None else self.shared(hidden_TH)
        self.context.compute_timer.pause()
        with self._stage("dispatch"):
            rows_NH, counts_E = self.dispatcher.finish(state)
        with self._stage("experts"):
            dropout = self._expert_dropout(computed, state, context)
            weight_N = self.dispatcher.row_weights(state) if self.weighs_inside else None
            host_E = self.dispatcher.host_counts(state) if self.reads_counts else None
            if self.reads_counts and host_E is None:
                host_E = counts_E.cpu()  # the one wait of this layer, where nothing is exchanged
            rows_NH = self._of_experts(rows_NH, counts_E, dropout, later, weight_N, host_E)
            if dropout is not None:
                rows_NH = dropout.on_output(rows_NH)
        with self._stage("combine"):
            combine = self.dispatcher.add_up if self.weighs_inside else self.dispatcher.combine
            output_TH = combine(rows_NH, state)
            if self.output_losses:
                output_TH = self._shown_to_losses(output_TH, computed, routing, context)
            if self.to_hidden is not None:
                output_TH = self.to_hidden(output_TH)
            if self.zero is not None:
                output_TH = self.zero(hidden_TH, own, output_TH)
        if self.shared is not None and shared_TH is not None:
            output_TH = self.shared.join(hidden_TH, shared_TH, output_TH)
        self._probe_experts(hidden_TH.dtype, routing, context)
        with kept_to_measure(context):
            output_TH = self._with_losses(output_TH, routing, real, context)
        self.context.compute_timer.resume()
        return output_TH

    def _put_off_gradients(self) -> Any:
        """Let the experts' weight gradients be computed beside the exchange of the rows' gradients."""
        if self.computes_experts_again or not self.sends_rows:
            return None
        return self.experts.put_off_gradients()

    def _of_experts(
        self,
        rows_NH: Tensor,
        counts_E: Tensor,
        dropout: ExpertDropout | None,
        later: Any,
        weight_N: Tensor | None,
        host_E: Tensor | None,
    ) -> Tensor:
        weights = () if weight_N is None else (weight_N,)
        read: dict[str, Any] = {} if host_E is None else {"host_E": host_E}
        if not self.computes_experts_again:
            return self.experts(rows_NH, counts_E, dropout, later, *weights, **read)
        given = (rows_NH, counts_E, dropout, *((None,) if weights else ()), *weights)
        output_NH: Tensor = recomputed(self.experts, [], *given, **read)
        return output_NH

    def _shown_to_losses(
        self, output_NH: Tensor, computed: Routing, routing: Routing, context: StepContext
    ) -> Tensor:
        """Return each token's weighted sum of the outputs of its pairs, which the losses see before."""
        for loss in self.output_losses:
            value_T = checked.called(loss, "of_tokens", output_NH, computed.pairs, computed.num_tokens)
            routing.extras[loss.extra] = self.token_sharding.all_gather(value_T, context)
        return weighted_sum(output_NH, computed, self.router.dims.kernels)

    def _probe_experts(self, dtype: torch.dtype, routing: Routing, context: StepContext) -> None:
        """Put what the experts make of the rows of an `ActivationLoss` into the routing's extras."""
        for loss in self.losses.values():
            if isinstance(loss, ActivationLoss):
                rows_PH = checked.called(loss, "rows_PH", routing, context)
                routing.extras[loss.extra] = self._norms(rows_PH.to(dtype))

    def _norms(self, rows_PH: Tensor) -> Tensor:
        """Return the norms of `ActivationLoss`, fp32 [P, E]; each rank computes its own experts' slices."""
        rows_PH = rows_PH if self.to_latent is None else self.to_latent(rows_PH)
        own = self.num_experts // self.expert_ranks.size
        counts_E = torch.full((own,), len(rows_PH), device=rows_PH.device)
        gate_NF = self.experts(rows_PH.repeat(own, 1), counts_E, only_gate=True)
        square_EP = gate_NF.float().square().sum(-1).view(own, len(rows_PH))
        square_EP = self.slice_ranks.all_gather(square_EP[None]).sum(0)
        square_EP = self.expert_ranks.all_gather(square_EP)
        return square_EP.clamp_min(torch.finfo(torch.float32).tiny).sqrt().T

    def _stage(self, name: str) -> AbstractContextManager[None]:
        """Return the context that measures a stage, if it is to be measured (`log.timers`)."""
        timers = self.context.timers
        measured = timers is not None and self.training and not self.recomputing
        return timers.stage(name) if timers is not None and measured else nullcontext()

    def _expert_dropout(self, own: Routing, state: Any, context: StepContext) -> ExpertDropout | None:
        """Return the dropout of the experts' rows in training, if a rate is set; row numbers travel with the
        rows.
        """
        output, activation = self.dropout
        if not self.training or output == activation == 0:
            return None
        index_T = self.token_sharding.local_context(context, own.num_tokens).token_index(
            own.num_tokens, own.pairs.token_N.device
        )
        token_N = own.pairs.token_N if own.places is None else own.pairs.token_N.clamp(max=len(index_T) - 1)
        row_N = index_T[token_N] * self.num_experts + own.pairs.expert_N
        draw_key = functools.partial(self.context.draw_key, self.router.dims.layer)
        row_N = self.dispatcher.send_along(row_N, state)
        return ExpertDropout(output, activation, row_N, draw_key, self.router.dims.kernels)

    def _with_losses(
        self, output_TH: Tensor, routing: Routing, real: Routing, context: StepContext
    ) -> Tensor:
        """real: the routing to the experts that compute."""
        if self.before_losses is not None:
            before_TE = self.context.scores[self.before_losses]
            routing.before_TE = self.token_sharding.all_gather(before_TE, context)
        values = {
            name: checked.loss_value(loss, routing, context)
            for name, loss in self.losses.items()
            if not isinstance(loss, Objective)
        }
        if not self.recomputing:
            losses = {name: value.detach() for name, value in values.items()}
            self.observation = observe(routing, losses, self.router.dims.kernels, real)
            self.routing = routing if self.objectives else None
        if context.measure_gradients and self.training and self.observation is not None:
            measure_gradients(self.observation, routing, self._weighted(values), context, self.token_sharding)
        if not values or not self.training:
            return output_TH
        return attach_losses(output_TH, values, self.loss_weights, self.context)

    @property
    def objectives(self) -> dict[str, Objective]:
        """The losses that need the model's token losses."""
        return {name: loss for name, loss in self.losses.items() if isinstance(loss, Objective)}

    def objective(self, token_losses_T: Tensor) -> Tensor:
        """Return the weighted sum of the objectives for the last forward pass, a scalar; token_losses_T:
        fp32.
        """
        assert self.routing is not None and self.observation is not None
        values = {
            name: checked.loss_value(part, self.routing, self.context, token_losses_T.detach())
            for name, part in self.objectives.items()
        }
        self.observation.losses |= {name: value.detach() for name, value in values.items()}
        self.routing = None
        return self._weighted_sum(values)

    def after_step(self, load_E: Tensor) -> None:
        """Call the parts' `after_step`; load_E: int64, the pairs wanted in the whole batch."""
        for mask in self.router.masks:
            closed_E = checked.called(mask, "closed_E", self.context)
            if closed_E is not None:
                load_E = load_E.masked_fill(closed_E.to(load_E.device), -1)
        with torch.no_grad():
            for part in self._learning_parts:
                checked.called(part, "after_step", load_E, self.context)

    def parameters_after_step(self) -> list[nn.Parameter]:
        """The parameters that `after_step` may read: those of the parts that define it."""
        learning = [part for part in self._learning_parts if type(part).after_step is not Part.after_step]
        return [parameter for part in learning for parameter in part.parameters()]

    def measured_parts(self) -> dict[str, Part]:
        """Return the parts that declare metrics, by their names in the layer (`router.scorer`)."""
        return {name: part for name, part in self._parts.items() if type(part).metrics is not Part.metrics}

    def constraints(self) -> list[Constraint]:
        """Return the projections of all parts, see `Part.constraints`."""
        return [constraint for part in self._learning_parts for constraint in checked.constraints(part)]

    @functools.cached_property
    def _parts(self) -> dict[str, Part]:
        """Its parts by their names in it, which do not change once it is built."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Part)}

    @functools.cached_property
    def _learning_parts(self) -> list[Part]:
        frozen = set(self.router.modules()) if "router" in self.frozen else set()
        return [part for part in self._parts.values() if part not in frozen]

    def _weighted(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value * self.loss_weights[name] for name, value in values.items()}

    def _weighted_sum(self, values: dict[str, Tensor]) -> Tensor:
        return torch.stack([*self._weighted(values).values()]).sum()


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


def _shared_experts(config: MoEConfig, shape: LayerShape) -> SharedExperts | None:
    if config.num_shared_experts == 0:
        return None
    size = shared_ffn_size(config, shape.ffn_size)
    mix_std, options = shape.init_std / shape.width, _expert_options(shape)
    return SharedExperts(shape.hidden_size, size, mode=config.shared_expert_mode, mix_std=mix_std, **options)


def _zero_experts(config: MoEConfig, shape: LayerShape) -> ZeroExperts | None:
    if config.zero_experts.total == 0:
        return None
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


def _latent_projections(
    config: MoEConfig, shape: LayerShape
) -> tuple[LatentProjection | None, LatentProjection | None]:
    """Return the projections to the experts' space and back, or None where they compute hidden states."""
    if config.latent_size is None:
        return None, None
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
