"""One optimiser step, and its record.

The lm loss is the mean over the unmasked tokens of the global batch, over ranks and accumulation alike:
the tokens are counted first, then each micro batch contributes its sum over that count. The auxiliary
losses are the mean of their values on the micro batches, summed over layers with their weights. The
engine averages gradients over ranks; both scales below undo that, and nothing else divides.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.data.batches import Batch
from megamoe.kernels.documents import Documents
from megamoe.model.gpt import GPT
from megamoe.moe.part import StepContext
from megamoe.resilience.heartbeat import tick
from megamoe.resilience.skipped_steps import Problem
from megamoe.zero.engine import Engine

ROLLOUT_BIT = 48  # of a token's index, above the number of any token in the data


@dataclass
class LayerLoad:
    """The load of one MoE layer in a step, over all ranks: int64 [E] pairs wanted and computed."""

    load_E: Tensor
    wanted_E: Tensor


@dataclass
class StepRecord:
    """The sums of a step; `reduce` makes them the global batch's.

    losses: each auxiliary loss, unweighted, summed over layers and micro batches; weighted: the sum of
    weight * loss over all of them. problem: why the step was not applied. not_finite: of this rank's micro
    batches, by their places, the samples whose lm loss is not finite. message: printed by the loop.
    """

    lm_sum: float = 0.0
    tokens: float = 0.0
    micro_batches: int = 0
    weighted: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    layers: dict[int, LayerLoad] = field(default_factory=dict)
    grad_norm: float = float("nan")
    problem: Problem | None = None
    not_finite: dict[int, list[int]] = field(default_factory=dict)
    message: str = ""

    def add(self, model: GPT, lm_sum: float, tokens: float) -> None:
        """Add one micro batch after its forward pass."""
        self.lm_sum += lm_sum
        self.tokens += tokens
        self.micro_batches += 1
        for number, layer in model.moe_layers():
            seen = layer.observation
            assert seen is not None
            for name, value in seen.losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + float(value)
                self.weighted += float(value) * layer.loss_weights[name]
            known = self.layers.get(number)
            if known is None:
                self.layers[number] = LayerLoad(seen.load_E.clone(), seen.wanted_E.clone())
            else:
                known.load_E += seen.load_E
                known.wanted_E += seen.wanted_E

    def reduce(self, device: torch.device, copies: int) -> None:
        """Sum over all ranks in one collective; all ranks get the same bits.

        copies: the number of ranks with the same micro batch. float64 holds counts exactly up to 2^53.
        """
        names = sorted(self.losses)
        numbers = sorted(self.layers)
        head = [self.lm_sum, self.tokens, float(self.micro_batches), self.weighted]
        head += [self.losses[name] for name in names]
        counts = [tensor for n in numbers for tensor in (self.layers[n].load_E, self.layers[n].wanted_E)]
        packed = torch.cat([torch.tensor(head, dtype=torch.float64)] + [c.double().cpu() for c in counts]).to(
            device
        )
        dist.all_reduce(packed)
        values = packed.cpu() / copies
        self.lm_sum, self.tokens, micro_batches, self.weighted = values[:4].tolist()
        self.micro_batches = round(micro_batches)
        for place, name in enumerate(names):
            self.losses[name] = float(values[4 + place])
        rest = values[4 + len(names) :].long()
        for number in numbers:
            experts = self.layers[number].load_E.numel()
            self.layers[number] = LayerLoad(rest[:experts], rest[experts : 2 * experts])
            rest = rest[2 * experts :]

    @property
    def lm_loss(self) -> float:
        """The mean cross entropy of the unmasked tokens, in nats."""
        return self.lm_sum / max(self.tokens, 1.0)

    @property
    def loss(self) -> float:
        """The lm loss plus the auxiliary losses, weighted and summed over layers."""
        return self.lm_loss + self.weighted / max(self.micro_batches, 1)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics by their names in metrics.jsonl; an auxiliary loss is a mean over layers and
        micro batches.
        """
        values: dict[str, Any] = {
            "train/lm_loss": self.lm_loss,
            "train/loss": self.loss,
        }
        for name, total in self.losses.items():
            values[f"train/{name}"] = total / (self.micro_batches * len(self.layers))
        values["train/grad_norm"] = self.grad_norm
        for number, layer in self.layers.items():
            load, wanted = layer.load_E.double(), int(layer.wanted_E.sum())
            prefix = f"moe/layer_{number:02d}"
            values[f"{prefix}/load"] = layer.load_E.tolist()
            values[f"{prefix}/imbalance"] = float(load.max() / load.mean()) if load.sum() > 0 else 0.0
            values[f"{prefix}/dropped"] = 1 - float(load.sum()) / wanted if wanted else 0.0
        return values


def train_step(
    engine: Engine,
    context: StepContext,
    batches: list[Batch],
    lr: float,
    label_smoothing: float,
    micro_batches_before: int = 0,
    judge: Callable[[float, float], Problem | None] = lambda lm_loss, loss: None,
) -> StepRecord:
    """Forward and backward over this rank's micro batches, then one update of the weights.

    micro_batches_before: those of all ranks in the steps before this one. judge: of the batch's lm loss and
    loss, whether the weights must stay as they are; they do, too, where the gradient norm is not finite.
    """
    device = engine.world.device
    model = engine.model
    assert isinstance(model, GPT)
    engine.set_accumulation(len(batches))
    tokens = torch.stack([batch.loss_mask_BS.sum(dtype=torch.float64) for batch in batches]).sum().to(device)
    dist.all_reduce(tokens, group=engine.data_group)
    lm_scale = engine.layout.data / max(float(tokens), 1.0)
    # Every tensor-parallel rank works out a micro batch's auxiliary losses, and their gradients are summed.
    share = 1.0 / (len(batches) * engine.layout.tensor)
    # Attached inside the graph: the engine, which scales the loss, does not see these.
    context.aux_scale = share * engine.loss_scale
    rollouts = num_rollouts(model)
    record = StepRecord()
    for place, batch in enumerate(batches):
        batch = batch.to(device).repeat(rollouts)
        set_context(context, batch, micro_batches_before + _number(engine, place), rollouts)
        losses_BS = engine.forward(
            last=place == len(batches) - 1, label_smoothing=label_smoothing, **model_inputs(batch)
        )
        masked_BS = losses_BS * batch.loss_mask_BS
        lm_sum = masked_BS.sum() / rollouts
        loss = lm_sum * lm_scale
        for _, layer in model.moe_layers():
            if layer.objectives:
                loss = loss + share * layer.objective(masked_BS.transpose(0, 1).reshape(-1))
        engine.backward(loss)
        value = float(lm_sum.detach())
        record.add(model, value, float(batch.loss_mask_BS.sum()) / rollouts)
        if not math.isfinite(value):
            record.not_finite[place] = _samples_not_finite(masked_BS, batch)
        tick()
    record.reduce(device, copies=engine.layout.tensor)
    record.problem = judge(record.lm_loss, record.loss)
    scale, can_fall = engine.loss_scale, engine.loss_scale_can_fall
    record.grad_norm = engine.step(lr, rest=record.problem is not None)
    if record.problem is None and engine.step_skipped:
        at_scale = f" at loss scale {scale:g}" if engine.precision == "fp16" else ""
        record.problem = Problem(f"train/grad_norm is {record.grad_norm}{at_scale}", counts=not can_fall)
    return record


def _samples_not_finite(losses_BS: Tensor, batch: Batch) -> list[int]:
    """Return the samples whose loss is not finite; all of them if only their sum is not."""
    finite_B = losses_BS.detach().isfinite().all(1)
    broken_B = ~finite_B if not finite_B.all() else finite_B
    samples: list[int] = batch.sample_index_B[broken_B.to(batch.sample_index_B.device)].unique().tolist()
    return samples


@torch.no_grad()
def evaluate(engine: Engine, context: StepContext, batches: Iterable[Batch]) -> float:
    """Return the mean cross entropy over the unmasked tokens of all ranks' batches, in nats, in evaluation
    mode.
    """
    model = engine.model
    assert isinstance(model, GPT)
    sums = torch.zeros(2, dtype=torch.float64)
    engine.train(False)
    for place, batch in enumerate(batches):
        batch = batch.to(engine.world.device)
        set_context(context, batch, _number(engine, place))
        losses_BS = model(**model_inputs(batch))
        sums += torch.stack([(losses_BS * batch.loss_mask_BS).sum(), batch.loss_mask_BS.sum()]).double().cpu()
        tick()
    engine.train(True)
    sums = sums.to(engine.world.device)
    dist.all_reduce(sums, group=engine.data_group)
    total, tokens = sums.tolist()
    return float(total / max(tokens, 1.0))


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
    context.sample_index_B = sample_B
    context.micro_batch = number
    context.num_rollouts = rollouts


def num_rollouts(model: GPT) -> int:
    """Return how many times each sequence is routed for an objective."""
    counts = [part.num_rollouts for _, layer in model.moe_layers() for part in layer.objectives.values()]
    return max(counts, default=1)


def model_inputs(batch: Batch) -> dict[str, Tensor | Documents | None]:
    """Return the keyword arguments of GPT.forward."""
    start_BS = batch.document_start_BS
    return {
        "tokens_BS": batch.tokens_BS,
        "position_ids_BS": batch.position_ids_BS,
        "labels_BS": batch.labels_BS,
        "documents": None if start_BS is None else Documents.of(start_BS, batch.tokens_BS.device),
    }
