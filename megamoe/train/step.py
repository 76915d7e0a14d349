"""One optimiser step.

The lm loss is the mean over the unmasked tokens of the global batch, over ranks and accumulation alike:
the tokens are counted first, then each micro batch contributes its sum divided by that count. The auxiliary
losses are the mean of their values on the micro batches, summed over layers with their weights. The engine
averages gradients over the ranks that hold the same dense weights. The scale of the lm loss cancels this
average. The scale of the auxiliary losses divides by the number of micro batches and of tensor-parallel
ranks. Nothing else divides.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.data.batches import Batch, positions
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.kernels.autograd import Function
from megamoe.metrics.names import GRAD_NORM
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.moe.context import LayerTrace, MicroBatch
from megamoe.moe.interleaving import Interleaving, yield_to_other
from megamoe.moe.observation import Observation
from megamoe.moe.part import StepContext
from megamoe.objectives.objective import TrainingObjective
from megamoe.parallel.consensus import gather_from_ranks
from megamoe.parallel.pipeline.schedule import Pass, training_order
from megamoe.parallel.zero.engine import Engine
from megamoe.resilience.heartbeat import tick
from megamoe.resilience.skipped_steps import Problem
from megamoe.train.micro_batch import PassState, begin_second, micro_batch_of
from megamoe.train.step_record import StepRecord, merged_over_stages
from megamoe.train.step_sums import LossSums, MultiTokenLosses, StepSums, measured_parameters, part_metrics


def train_step(
    engine: Engine,
    context: StepContext,
    batches: list[Batch],
    lr: float,
    label_smoothing: float,
    micro_batches_before: int = 0,
    reason_to_skip: Callable[[float, float], Problem | None] = lambda lm_loss, loss: None,
    in_flight: int = 1,
) -> StepRecord:
    """Forward and backward over this rank's micro batches, then one update of the weights.

    micro_batches_before: those of all ranks in the steps before this one. reason_to_skip(lm_loss, loss):
    returns a reason to skip the update, or None. A gradient norm that is not finite always skips it.
    in_flight: 2 lets micro batches take turns in pairs (`train.in_flight`); an odd one is the last, alone.
    """
    engine.set_accumulation(len(batches))
    passes = Passes(engine, context, batches, label_smoothing, micro_batches_before)
    paired = len(batches) - len(batches) % 2 if in_flight == 2 else 0
    for first in range(0, paired, 2):
        passes.in_flight(first, last=first + 2 == len(batches))
        tick()
    order = training_order(passes.stage, passes.stages, passes.chunks, len(batches))
    order = [each for each in order if each.micro_batch >= paired]
    for place, each in enumerate(order):
        if each.forward:
            passes.forward(each)
        else:
            passes.backward(each, last=place == len(order) - 1)
        tick()
    passes.finish()
    record = passes.record()
    record.problem = reason_to_skip(record.lm_loss, record.loss)
    _update(engine, record, lr)
    return record


@dataclass
class _Kept:
    """What a forward pass leaves for the backward pass of the same micro batch and chunk.

    received: the hidden states of the part before, and routers' scores; nothing in the model's first part.
    outputs: a loss, or this part's hidden states and scores. batch: as the layers know it. observations: of
    the chunk's MoE layers.
    """

    received: list[Tensor]
    outputs: list[Tensor]
    batch: MicroBatch
    observations: dict[int, Observation]


class Passes:
    """The forward and backward passes of one step on this pipeline stage; without stages, of the model.

    stage, stages, chunks: see `training_order`.
    """

    def __init__(
        self, engine: Engine, context: StepContext, batches: list[Batch], label_smoothing: float, before: int
    ) -> None:
        model: LanguageModel = engine.model
        self.engine, self.context, self.batches, self.model = engine, context, batches, model
        self.stage, self.stages = engine.pipeline_rank, engine.layout.pipeline
        self.chunks = model.num_chunks
        self._smoothing, self._before = label_smoothing, before
        self._mtp = MultiTokenLosses(model)
        with context.compute_timer.paused():  # the scales count tokens over the ranks
            self._scale_K = self._mtp.scales(batches, engine)  # on the device, where they are needed
        # Every rank that shares a micro batch works out its auxiliary losses, and their gradients are summed.
        self._share = 1.0 / (len(batches) * engine.layout.tensor)
        # Attached inside the graph: the engine, which scales the loss, does not see these.
        context.aux_scale = self._share * engine.loss_scale
        self._rollouts = num_rollouts(model)
        self._sums = StepSums()
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._on_device: dict[int, Batch] = {}  # the micro batches that are alive
        self._observations: dict[int, dict[int, Observation]] = {}  # of each micro batch, after backward
        self._of_loss: dict[int, LossSums] = {}
        self._judged: list[tuple[Tensor, Tensor]] = []  # of each micro batch: lm loss, finite_B

    def in_flight(self, first: int, last: bool) -> None:
        """Compute micro batch `first` and the next one, which take turns, forward and backward.

        last: whether they are the step's last ones.
        """
        context, device = self.context, self.engine.world.device
        both = Pass(True, first), Pass(True, first + 1)
        seed = int(torch.randint(2**62, (1,), device="cpu"))

        def second() -> None:
            begin_second(context, seed, device)
            self.forward(both[1], in_flight=1)

        turns = Interleaving(
            lambda: PassState.leave(context, device),
            lambda state: state.enter(context, device),
            lambda place: setattr(context, "batch", self._kept[first + place, 0].batch),
        )
        turns.run(lambda: self.forward(both[0], in_flight=0), second, device)
        self.engine.backward_in_flight([self._kept[first + place, 0].outputs[0] for place in (0, 1)], last)
        for each in both:
            kept = self._kept.pop((each.micro_batch, 0))
            context.batch = kept.batch  # the second one's stays
            self._finish_micro_batch(each, kept)

    def forward(self, each: Pass, in_flight: int | None = None) -> None:
        """Compute one part of the model; receive what it needs, and send what the next part needs.

        in_flight: the place among two micro batches that take turns.
        """
        place, engine, context = each.micro_batch, self.engine, self.context
        if place not in self._on_device:
            self._on_device[place] = self.batches[place].to(engine.world.device).repeat(self._rollouts)
        batch = self._on_device[place]
        number = self._before + micro_batch_number(engine, place)
        context.batch = micro_batch_of(batch, number, self._rollouts)
        received_SBH = receive_hidden(engine, context, batch, each.chunk)
        received = [] if received_SBH is None else [received_SBH]
        received += receive_scores(engine, context, batch, each.chunk)
        for tensor in received:
            tensor.requires_grad_()
        forward = engine.forward if in_flight is None else partial(engine.forward_in_flight, in_flight)
        output = forward(
            label_smoothing=self._smoothing,
            **model_inputs(batch),
            **of_stage(engine, received_SBH, each.chunk),
        )
        context.compute_timer.end()  # of the first micro batch
        if self.model.ends(each.chunk):
            output = yield_to_other(self._loss(place, batch, output))
        outputs = [output, *scores_of(context, self.model.scores_out(each.chunk))]
        if not self.model.ends(each.chunk):
            for tensor in outputs:
                engine.links.send_forward(tensor.detach())
        layers = self.model.moe_layers_of(each.chunk)
        observations = {number: context.trace(number).observation for number, _ in layers}
        kept = _Kept(received, outputs, context.batch, observations)
        if not self.model.ends(each.chunk):
            output.data = output.new_empty(0)  # its graph is needed, its values are not
        self._kept[place, each.chunk] = kept

    def _loss(self, place: int, batch: Batch, losses_BS: Tensor) -> Tensor:
        """Return the loss of a micro batch, a scalar, and take in its sums."""
        mask_BS, parts = own_positions(self.model, batch.loss_mask_BS), self.engine.layout.context
        masked_BS = losses_BS * mask_BS
        lm_sum = masked_BS.sum() / self._rollouts
        loss = lm_sum * self._scale_K[0]
        mtp_sums = self._mtp.sums(batch, self._rollouts)
        if mtp_sums is not None:
            loss = loss + self._mtp.weighted(mtp_sums[0] * self._scale_K[1:])
        for _, layer in self.model.moe_layers():
            if layer.losses.objectives:
                loss = loss + self._share * layer.objective(masked_BS.transpose(0, 1).reshape(-1))
        tokens = mask_BS.sum().double() / self._rollouts
        # The record divides by all ranks that share the micro batch; those of its parts have different sums.
        self._of_loss[place] = LossSums(lm_sum.detach(), tokens, mtp_sums).times(parts)
        self._judged.append((lm_sum.detach(), masked_BS.detach().isfinite().all(1)))
        return loss

    def backward(self, each: Pass, last: bool) -> None:
        """Accumulate the gradients of one part; `last`: whether it is the stage's last pass of the step."""
        kept = self._kept.pop((each.micro_batch, each.chunk))
        if self.stages > 1:
            # Recomputation reads the context and marks the observations of this micro batch.
            self.context.batch = kept.batch
        loss, *scores = kept.outputs
        if not self.model.ends(each.chunk):
            shape = hidden_shape(self.engine, self._on_device[each.micro_batch])
            loss = loss_with_gradient(loss, self._receive(shape, self.engine.dtype))
            for scores_TE in scores:
                gradient_TE = self._receive(scores_TE.shape, torch.float32)
                loss = loss + loss_with_gradient(scores_TE, gradient_TE)
        self.engine.backward(loss, last, completes=each.micro_batch == len(self.batches) - 1)
        for tensor in kept.received:
            # A loss may read the scores of the layer before without gradient.
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            self.engine.links.send_backward(gradient)
        self._finish_micro_batch(each, kept)

    def _finish_micro_batch(self, each: Pass, kept: _Kept) -> None:
        """Take in the sums of a micro batch, when its last backward pass on this stage is over."""
        kept.batch.traces.clear()
        observations = self._observations.setdefault(each.micro_batch, {})
        observations |= kept.observations
        if each.chunk == 0:  # the last one that a stage computes for a micro batch
            of_loss = self._of_loss.pop(each.micro_batch, None)
            del self._on_device[each.micro_batch]
            observations = self._observations.pop(each.micro_batch)
            device = self.engine.world.device
            self._sums.add(observations, self.model.loss_weights, of_loss, device)

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self.context.compute_timer.paused():
            return self.engine.links.receive_backward(shape, dtype, self.engine.world.device)

    def finish(self) -> None:
        """Wait for what was sent to other stages, and sum the gradients over the ranks."""
        if self.stages > 1:
            self.engine.finish_gradients()
            self.engine.links.finish()

    def record(self) -> StepRecord:
        """Return the step's sums over all ranks. Collective."""
        engine, model = self.engine, self.model
        with engine.gathered(measured_parameters(model)):
            seconds = self.context.compute_timer.seconds
            copies = engine.layout.batch_ranks
            squares = engine.gradient_squares()
            record = self._sums.record(copies, part_metrics(model), seconds, engine.groups.stage, squares)
        record.mtp_weight = self._mtp.weight
        if self.stages > 1:
            record = merged_over_stages(record, engine.groups.pipeline)
        if self._judged and not math.isfinite(record.lm_sum):
            record.not_finite = _samples_not_finite(self._judged, self.batches, self._rollouts)
        return record


def _update(engine: Engine, record: StepRecord, lr: float) -> None:
    """Update the weights, unless the record has a problem, and write down what came of it."""
    scale, can_fall = engine.loss_scale, engine.loss_scaling.can_fall
    record.grad_norm = engine.step(lr, record.problem is None, record.gradient_squares)
    if record.problem is None and engine.step_skipped:
        if engine.precision == "fp16":  # an overflow of the scaled gradients
            where = f" at loss scale {scale:g}"
        else:
            where = _name_not_finite(record, gather_from_ranks(engine.not_finite))
        record.problem = Problem(f"{GRAD_NORM} is {record.grad_norm}{where}", counts=not can_fall)


def _name_not_finite(record: StepRecord, found: list[dict[str, str]]) -> str:
    """Return the parameter groups and ranks with gradients that are not finite, for a message.

    found: of each rank, `Engine.not_finite`. DeepSpeed's norm is infinite for NaN too: the record gets NaN.
    """
    if any(kind == "nan" for each in found for kind in each.values()):
        record.grad_norm = math.nan
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        for group in each:
            ranks.setdefault(group, []).append(rank)
    named = [f"{group} (rank {', '.join(map(str, those))})" for group, those in ranks.items()]
    return f", in the parameter groups {'; '.join(named)}" if named else ""


def _samples_not_finite(
    judged: list[tuple[Tensor, Tensor]], batches: list[Batch], rollouts: int
) -> dict[int, list[int]]:
    """Return the samples whose loss is not finite by the place of their micro batch.

    If only the sum over a micro batch is not finite, these are all its samples.
    """
    found: dict[int, list[int]] = {}
    for place, (lm_sum, finite_B) in enumerate(judged):
        if lm_sum.isfinite():
            continue
        broken_B = ~finite_B if not finite_B.all() else finite_B
        found[place] = batches[place].sample_index_B.repeat(rollouts)[broken_B.cpu()].unique().tolist()
    return found


@torch.no_grad()
def evaluate(
    engine: Engine, context: StepContext, batches: Iterable[Batch], objective: TrainingObjective | None = None
) -> dict[str, float]:
    """Return means over the unmasked tokens of all ranks' batches, in evaluation mode.

    They are `lm_loss`, the cross entropy in nats, and the sums of the objective (`evaluation_sums`).
    """
    names = () if objective is None else objective.metrics
    model: LanguageModel = engine.model
    sums = torch.zeros(2 + len(names), dtype=torch.float64, device=engine.world.device)
    engine.train(False)
    for place, batch in enumerate(batches):
        batch = batch.to(engine.world.device)
        context.batch = micro_batch_of(batch, micro_batch_number(engine, place))
        output = _evaluated(engine, context, batch)
        if output is not None:
            mask_BS = own_positions(model, batch.loss_mask_BS)
            found = [mask_BS.sum(), (output * mask_BS).sum()]
            if objective is not None:
                further = objective.evaluation_sums(batch, model.label_logits())
                found += [further[name] for name in names]
            sums += torch.stack([each.double() for each in found])
        tick()
    engine.train(True)
    if engine.layout.pipeline > 1:
        engine.links.finish()
        dist.all_reduce(sums, group=engine.groups.pipeline)  # only the last stage has any
    if engine.groups.context is not None:
        dist.all_reduce(sums, group=engine.groups.context)
    dist.all_reduce(sums, group=engine.groups.data)
    tokens, *totals = sums.tolist()
    return {name: total / max(tokens, 1.0) for name, total in zip(("lm_loss", *names), totals, strict=True)}


def _evaluated(engine: Engine, context: StepContext, batch: Batch) -> Tensor | None:
    """Return the loss of each label of a micro batch, fp32 [B, S]; None where another stage has it."""
    model: LanguageModel = engine.model
    for chunk in range(model.num_chunks):
        received_SBH = receive_hidden(engine, context, batch, chunk)
        receive_scores(engine, context, batch, chunk)
        output: Tensor = model(**model_inputs(batch), **of_stage(engine, received_SBH, chunk))
        if model.ends(chunk):
            return output
        for tensor in (output, *scores_of(context, model.scores_out(chunk))):
            engine.links.send_forward(tensor)
    return None


def micro_batch_number(engine: Engine, place: int) -> int:
    """Return the number of this rank's micro batch `place` over all ranks, which take micro batches in
    turn.
    """
    return place * engine.layout.data + engine.layout.data_rank(engine.world.rank)


def own_positions(model: LanguageModel, values_BS: Tensor) -> Tensor:
    """Return this rank's part of whole sequences, [B, S / context]."""
    shard = model.context_shard
    return values_BS if shard is None else shard.own(values_BS, dim=1)


def hidden_shape(engine: Engine, batch: Batch) -> tuple[int, int, int]:
    """Return the shape [S, B, H] of a micro batch's hidden states on one rank."""
    num_sequences, length = batch.tokens_BS.shape
    return length // engine.sequence_shards, num_sequences, engine.hidden_size


def receive_hidden(engine: Engine, context: StepContext, batch: Batch, chunk: int) -> Tensor | None:
    """Return the hidden states that another stage sends for a chunk, [S, B, H]; None for the first part."""
    if engine.model.begins(chunk):
        return None
    with context.compute_timer.paused():
        return engine.links.receive_forward(hidden_shape(engine, batch), engine.dtype, engine.world.device)


def receive_scores(engine: Engine, context: StepContext, batch: Batch, chunk: int) -> list[Tensor]:
    """Put the routers' scores that another stage sends for a chunk into the context, and return them, fp32
    [T, E].

    T: the tokens that this rank's MoE layers get; the other stage knows the same batch.
    """
    layout, wanted = engine.layout, engine.model.scores_in(chunk)
    if not wanted:
        return []
    tokens = batch.tokens_BS.numel() // layout.batch_ranks
    padding = context.batch.padding
    if padding is not None:
        bounds, rank = padding.bounds(layout.batch_ranks), engine.world.rank % layout.batch_ranks
        tokens = bounds[rank + 1] - bounds[rank]
    with context.compute_timer.paused():
        for number, experts in wanted.items():
            scores_TE = engine.links.receive_forward((tokens, experts), torch.float32, engine.world.device)
            context.batch.traces[number] = LayerTrace(scores_TE=scores_TE)
    return scores_of(context, wanted)


def scores_of(context: StepContext, layers: Iterable[int]) -> list[Tensor]:
    """Return the scores that these layers have kept, fp32 [T, E] each."""
    scores = [context.trace(number).scores_TE for number in layers]
    return [scores_TE for scores_TE in scores if scores_TE is not None]


def of_stage(engine: Engine, received_SBH: Tensor | None, chunk: int) -> dict[str, Any]:
    """Return the further arguments of the forward pass of a pipeline stage; none without pipeline."""
    return {} if engine.layout.pipeline == 1 else {"hidden_SBH": received_SBH, "chunk": chunk}


class _GivenGradient(Function):
    """A zero whose backward sends `gradient` into `output`, whatever the zero is scaled by."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> tuple[Tensor, None]:
        gradient: Tensor = ctx.gradient
        return gradient, None


def loss_with_gradient(output: Tensor, gradient: Tensor) -> Tensor:
    """Return a scalar by whose backward pass `output` gets `gradient`: DeepSpeed's engine takes only scalars.

    It does so whatever the scalar is multiplied by: the received gradient has fp16's loss scale already.
    """
    return _GivenGradient.apply(output, gradient)


def num_rollouts(model: LanguageModel) -> int:
    """Return how many times each sequence is routed for an objective."""
    counts = [
        part.num_rollouts for _, layer in model.moe_layers() for part in layer.losses.objectives.values()
    ]
    return max(counts, default=1)


def model_inputs(batch: Batch) -> dict[str, Tensor | Documents | SourceLengths | None]:
    """Return the keyword arguments of the model's forward, see `LanguageModel`."""
    start_BS, device, length = batch.document_start_BS, batch.tokens_BS.device, batch.tokens_BS.shape[1]
    documents = None if start_BS is None else Documents.of(start_BS, device)
    if batch.lengths_B is not None and start_BS is None:
        documents = Documents.of_lengths(batch.lengths_B, length, device)
    inputs: dict[str, Tensor | Documents | SourceLengths | None] = {
        "tokens_BS": batch.tokens_BS,
        "position_ids_BS": batch.position_ids_BS,
        "labels_BS": batch.labels_BS,
        "documents": documents,
    }
    if batch.predicted_P is not None:
        inputs["predicted_P"] = batch.predicted_P
    if batch.source_BL is not None and batch.source_lengths_B is not None:
        lengths_B, length = batch.source_lengths_B, batch.source_BL.shape[1]
        inputs["source_BL"] = batch.source_BL
        inputs["source_position_ids_BL"] = positions(lengths_B, length).to(device, non_blocking=True)
        inputs["source_documents"] = Documents.of_lengths(lengths_B, length, device)
        inputs["source_lengths"] = SourceLengths.of(lengths_B, length, device)
    return inputs
