"""One optimiser step.

The lm loss is the mean over the unmasked tokens of the global batch, over ranks and accumulation alike:
the tokens are counted first, then each micro batch contributes its sum over that count. The auxiliary
losses are the mean of their values on the micro batches, summed over layers with their weights. The
engine averages gradients over ranks; both scales below undo that, and nothing else divides.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.data.batches import Batch
from megamoe.data.pairs import positions
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.moe.context import Padding, SourceTokens
from megamoe.moe.part import StepContext
from megamoe.objectives.objective import TrainingObjective
from megamoe.parallel.consensus import gather_from_ranks
from megamoe.parallel.zero.engine import Engine
from megamoe.resilience.heartbeat import tick
from megamoe.resilience.skipped_steps import Problem
from megamoe.train.step_record import (
    MultiTokenLosses,
    StepRecord,
    StepSums,
    measured_parameters,
    part_metrics,
)

ROLLOUT_BIT = 48  # of a token's index, above the number of any token in the data
PADDED_STRIDE = 2**24  # of token indices, where the length of the batch must have no influence


def train_step(
    engine: Engine,
    context: StepContext,
    batches: list[Batch],
    lr: float,
    label_smoothing: float,
    micro_batches_before: int = 0,
    reason_to_skip: Callable[[float, float], Problem | None] = lambda lm_loss, loss: None,
) -> StepRecord:
    """Forward and backward over this rank's micro batches, then one update of the weights.

    micro_batches_before: those of all ranks in the steps before this one. reason_to_skip(lm_loss, loss):
    returns a reason to skip the update, or None. A gradient norm that is not finite always skips it.
    """
    device = engine.world.device
    model = engine.model
    assert isinstance(model, LanguageModel)
    engine.set_accumulation(len(batches))
    mtp = MultiTokenLosses(model)
    with context.compute_timer.paused():  # the scales count tokens over the ranks
        scale_K = mtp.scales(batches, engine)  # on the device, where they are needed
    # Every tensor-parallel rank works out a micro batch's auxiliary losses, and their gradients are summed.
    share = 1.0 / (len(batches) * engine.layout.tensor)
    # Attached inside the graph: the engine, which scales the loss, does not see these.
    context.aux_scale = share * engine.loss_scale
    rollouts = num_rollouts(model)
    sums = StepSums()
    judged: list[tuple[Tensor, Tensor]] = []  # of each micro batch: lm loss, finite_B
    for place, batch in enumerate(batches):
        batch = batch.to(device).repeat(rollouts)
        set_context(context, batch, micro_batches_before + _number(engine, place), rollouts)
        losses_BS = engine.forward(
            last=place == len(batches) - 1, label_smoothing=label_smoothing, **model_inputs(batch)
        )
        context.compute_timer.end()  # of the first micro batch
        masked_BS = losses_BS * batch.loss_mask_BS
        lm_sum = masked_BS.sum() / rollouts
        loss = lm_sum * scale_K[0]
        mtp_sums = mtp.sums(batch, rollouts)
        if mtp_sums is not None:
            loss = loss + mtp.weighted(mtp_sums[0] * scale_K[1:])
        for _, layer in model.moe_layers():
            if layer.objectives:
                loss = loss + share * layer.objective(masked_BS.transpose(0, 1).reshape(-1))
        engine.backward(loss)
        sums.add(model, lm_sum, batch.loss_mask_BS.sum().double() / rollouts, mtp_sums)
        judged.append((lm_sum.detach(), masked_BS.detach().isfinite().all(1)))
        tick()
    with engine.gathered(measured_parameters(model)):
        record = sums.record(engine.layout.tensor, part_metrics(model), context.compute_timer.seconds)
    record.mtp_weight = mtp.weight
    if not math.isfinite(record.lm_sum):
        record.not_finite = _samples_not_finite(judged, batches, rollouts)
    record.problem = reason_to_skip(record.lm_loss, record.loss)
    _update(engine, record, lr)
    return record


def _update(engine: Engine, record: StepRecord, lr: float) -> None:
    """Update the weights, unless the record has a problem, and write down what came of it."""
    scale, can_fall = engine.loss_scale, engine.loss_scale_can_fall
    record.grad_norm = engine.step(lr, apply_update=record.problem is None)
    if record.problem is None and engine.step_skipped:
        if engine.precision == "fp16":  # an overflow of the scaled gradients
            where = f" at loss scale {scale:g}"
        else:
            where = _name_not_finite(record, gather_from_ranks(engine.not_finite))
        record.problem = Problem(f"train/grad_norm is {record.grad_norm}{where}", counts=not can_fall)


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
    model = engine.model
    assert isinstance(model, LanguageModel)
    sums = torch.zeros(2 + len(names), dtype=torch.float64, device=engine.world.device)
    engine.train(False)
    for place, batch in enumerate(batches):
        batch = batch.to(engine.world.device)
        set_context(context, batch, _number(engine, place))
        losses_BS = model(**model_inputs(batch))
        found = [batch.loss_mask_BS.sum(), (losses_BS * batch.loss_mask_BS).sum()]
        if objective is not None:
            further = objective.evaluation_sums(batch, model.label_logits())
            found += [further[name] for name in names]
        sums += torch.stack([each.double() for each in found])
        tick()
    engine.train(True)
    dist.all_reduce(sums, group=engine.data_group)
    tokens, *totals = sums.tolist()
    return {name: total / max(tokens, 1.0) for name, total in zip(("lm_loss", *names), totals, strict=True)}


def _number(engine: Engine, place: int) -> int:
    """Return the number of this rank's micro batch `place` over all ranks, which take micro batches in
    turn.
    """
    return place * engine.layout.data + engine.layout.data_rank(engine.world.rank)


def set_context(context: StepContext, batch: Batch, number: int, rollouts: int = 1) -> None:
    """Set the layers' context for a micro batch, in a block's token order (s * B + b).

    number: the micro batch's number in the run, over all ranks. `batch` holds every sequence `rollouts`
    times, each with separate draws.
    """
    num_sequences, length = batch.tokens_BS.shape
    device = batch.tokens_BS.device
    position_S = torch.arange(length, device=device)
    sample_B = batch.sample_index_B.to(device)
    distinct = num_sequences // rollouts
    rollout_B = torch.arange(num_sequences, device=device) // distinct
    index_SB = sample_B[None, :] * length + position_S[:, None] + (rollout_B[None, :] << ROLLOUT_BIT)
    context.token_index_T = index_SB.reshape(-1)
    context.token_ids_T = batch.tokens_BS.transpose(0, 1).reshape(-1)
    context.padding = None
    context.source = None
    if batch.lengths_B is not None:
        context.token_index_T = _padded_index_T(sample_B, length)
        context.padding = Padding.of(batch.lengths_B, length, device)
    if batch.source_BL is not None and batch.source_lengths_B is not None:
        source_length = batch.source_BL.shape[1]
        context.source = SourceTokens(
            _padded_index_T(sample_B, source_length),
            batch.source_BL.transpose(0, 1).reshape(-1),
            Padding.of(batch.source_lengths_B, source_length, device),
        )
    context.sample_index_B = sample_B
    context.micro_batch = number
    context.num_rollouts = rollouts


def _padded_index_T(sample_B: Tensor, length: int) -> Tensor:
    """Return token indices, int64 [S * B], that do not depend on how far a sequence is filled up."""
    position_S = torch.arange(length, device=sample_B.device)
    return (sample_B[None, :] * PADDED_STRIDE + position_S[:, None]).reshape(-1)


def num_rollouts(model: LanguageModel) -> int:
    """Return how many times each sequence is routed for an objective."""
    counts = [part.num_rollouts for _, layer in model.moe_layers() for part in layer.objectives.values()]
    return max(counts, default=1)


def model_inputs(batch: Batch) -> dict[str, Tensor | Documents | SourceLengths | None]:
    """Return the keyword arguments of the model's forward, see `LanguageModel`."""
    start_BS, device, length = batch.document_start_BS, batch.tokens_BS.device, batch.tokens_BS.shape[1]
    documents = None if start_BS is None else Documents.of(start_BS, device)
    if batch.lengths_B is not None:
        assert start_BS is None, "documents of sequences with padding"
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
