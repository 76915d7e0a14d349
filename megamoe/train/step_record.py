"""What one optimiser step showed: sums kept on the device, one collective and one copy to the host, a
record.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.data.batches import Batch
from megamoe.metrics.names import AUXILIARY_LOSS, GRAD_NORM, LM_LOSS, LOSS, MTP_LOSS, WEIGHTED_LOSS, fill
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.heads.multi_token_prediction import prediction_masks
from megamoe.moe.layer import MoELayer
from megamoe.moe.observation import WHOLE, Observation
from megamoe.parallel.zero.engine import Engine
from megamoe.resilience.skipped_steps import Problem


@dataclass
class LayerRecord:
    """What one MoE layer saw in a step, over all ranks and micro batches.

    load_E, wanted_E: int64, pairs computed and wanted, of the experts that compute. width_D: int64, tokens by
    their number of computed experts. entropy, top_1: sums over tokens, see `Observation`. losses: sums over
    micro batches, unweighted; loss_weights: their weights. gradient_shares: of the losses that reach the
    scores, in steps that measure them, see `gradient_share`. part_metrics: of the parts, by `<part>/<name>`.
    """

    load_E: Tensor
    wanted_E: Tensor
    width_D: Tensor
    entropy: float = 0.0
    top_1: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    loss_weights: dict[str, float] = field(default_factory=dict)
    gradient_shares: dict[str, float] = field(default_factory=dict)
    part_metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class StepRecord:
    """The sums of a step over the global batch.

    losses: each auxiliary loss, unweighted, summed over layers and micro batches. problem: why the step was
    not applied. not_finite: of this rank's micro batches, by their places, the samples whose lm loss is not
    finite. message: printed by the loop. wanted_on_device: `wanted_E` of every layer, on the device. mtp: the
    mean cross entropy of each depth of multi-token prediction; mtp_weight: of each of them in the loss.
    compute_seconds_R: of each rank, its own time in the step before (`LocalComputeTimer`); 0: not measured.
    gradient_squares: the sum of `Engine.gradient_squares` over the ranks, if there are any.
    """

    lm_sum: float = 0.0
    tokens: float = 0.0
    micro_batches: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    wanted_on_device: dict[int, Tensor] = field(default_factory=dict)
    mtp: list[float] = field(default_factory=list)
    mtp_weight: float = 0.0
    grad_norm: float = float("nan")
    problem: Problem | None = None
    not_finite: dict[int, list[int]] = field(default_factory=dict)
    message: str = ""
    compute_seconds_R: list[float] = field(default_factory=list)
    gradient_squares: float | None = None

    @property
    def lm_loss(self) -> float:
        """Mean cross entropy of the unmasked tokens, nats."""
        return self.lm_sum / max(self.tokens, 1.0)

    @property
    def loss(self) -> float:
        """The lm loss plus the weighted losses of multi-token prediction and of the layers."""
        weighted = sum(self.weighted_sum(name) for name in self.losses)
        loss = self.lm_loss + weighted / max(self.micro_batches, 1)
        return loss + self.mtp_weight * sum(self.mtp)

    def weighted_sum(self, name: str) -> float:
        """Return weight * loss of an auxiliary loss, summed over layers and micro batches."""
        weights = {layer.loss_weights[name] for layer in self.layers.values() if name in layer.loss_weights}
        if len(weights) == 1:
            return weights.pop() * self.losses[name]
        return sum(
            layer.loss_weights[name] * layer.losses[name]
            for layer in self.layers.values()
            if name in layer.loss_weights
        )

    def metrics(self) -> dict[str, Any]:
        """Return the losses and the gradient norm under metrics.jsonl's names."""
        values: dict[str, Any] = {LM_LOSS: self.lm_loss, LOSS: self.loss}
        for depth, mtp in enumerate(self.mtp, 1):
            values[fill(MTP_LOSS, depth)] = mtp
        for name, total in self.losses.items():
            having = sum(name in layer.loss_weights for layer in self.layers.values())
            values[fill(AUXILIARY_LOSS, name)] = total / (self.micro_batches * having)
            values[fill(WEIGHTED_LOSS, name)] = self.weighted_sum(name) / self.micro_batches
        values[GRAD_NORM] = self.grad_norm
        return values


def merged_over_stages(record: StepRecord, pipeline: dist.ProcessGroup) -> StepRecord:
    """Return the record of the whole model from those of its stages, the same on every rank. Collective.

    `wanted_on_device` and `not_finite` stay those of this stage, `mtp_weight` that of the last one.
    """
    mine = replace(record, wanted_on_device={})
    stages: list[Any] = [None] * dist.get_world_size(pipeline)
    dist.all_gather_object(stages, mine, group=pipeline)
    losses: dict[str, float] = {}
    for name, value in (item for stage in stages for item in stage.losses.items()):
        losses[name] = losses.get(name, 0.0) + value
    layers = {number: layer for stage in stages for number, layer in stage.layers.items()}
    return replace(
        record,
        lm_sum=stages[-1].lm_sum,
        tokens=stages[-1].tokens,
        losses=losses,
        layers=dict(sorted(layers.items())),
        mtp=stages[-1].mtp,
        mtp_weight=stages[-1].mtp_weight,
        compute_seconds_R=[sum(each) for each in zip(*(s.compute_seconds_R for s in stages), strict=True)],
    )


GATE_SUMS = 2  # of each layer: entropy and largest share


class HasMoELayers(Protocol):
    """A model, as far as its sums need it."""

    def moe_layers(self) -> Iterable[tuple[int, MoELayer]]: ...


@dataclass(frozen=True)
class LossSums:
    """The sums over the unmasked tokens of one micro batch: scalars on the device.

    lm_sum: of their losses. tokens: their number, fp64. mtp: both of multi-token prediction, [depths] each.
    """

    lm_sum: Tensor
    tokens: Tensor
    mtp: tuple[Tensor, Tensor] | None = None

    def times(self, factor: int) -> "LossSums":
        """Return the sums multiplied."""
        if factor == 1:
            return self
        mtp = None if self.mtp is None else (self.mtp[0] * factor, self.mtp[1] * factor)
        return LossSums(self.lm_sum * factor, self.tokens * factor, mtp)


class StepSums:
    """What this rank's micro batches of one step add up to. Only `record` waits for the device."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._lengths: dict[int, list[int]] = {}  # of each layer, its vectors in _counts
        self._sizes: dict[int, int] = {}  # of each layer, how many of _counts
        self._counts: Tensor | None = None  # int64 load, wanted and width of the layers, one after the other
        self._names: list[str] = []  # of the auxiliary losses of any layer
        self._weights: dict[int, dict[str, float]] = {}  # of each layer's losses
        self._sums: Tensor | None = None  # fp64: lm loss, tokens, and the losses of _names
        self._mtp: Tensor | None = None  # fp64 [2 * depths]: losses of multi-token prediction, tokens
        self._values: Tensor | None = None  # fp64 [layers, losses of _names + GATE_SUMS]
        self._squares: Tensor | None = None  # fp64 [layers, losses of _names + 1], see `gradient_share`

    def add(
        self,
        observations: dict[int, Observation],
        loss_weights: dict[int, dict[str, float]],
        of_loss: LossSums | None,
        device: torch.device | None = None,
    ) -> None:
        """Take in one micro batch after its backward pass.

        observations: of this rank's MoE layers, by number. loss_weights: of their losses. of_loss: None on a
        pipeline stage without a loss. device: of the sums, where there is neither a loss nor a layer.
        """
        self.micro_batches += 1
        if of_loss is None:
            seen = next(iter(observations.values()), None)
            device = device if seen is None else seen.load_E.device
            sums = torch.zeros(2, dtype=torch.float64, device=device)
        else:
            sums = torch.stack([of_loss.lm_sum.detach().double(), of_loss.tokens.double()])
        if of_loss is not None and of_loss.mtp is not None:
            both = torch.cat([values.detach().double() for values in of_loss.mtp])
            self._mtp = both if self._mtp is None else self._mtp + both
        by_layer: list[Tensor] = []
        squares: list[Tensor] = []
        counted: list[Tensor] = []
        if observations:
            self._weights = loss_weights
            self._names = sorted({name for seen in observations.values() for name in seen.losses})
        for number, seen in sorted(observations.items()):
            known = [name in seen.losses for name in self._names]
            nothing = seen.entropy if all(known) else seen.entropy.new_zeros(())  # in layers without the loss
            by_layer += [
                seen.losses[name].detach() if has else nothing
                for name, has in zip(self._names, known, strict=True)
            ]
            by_layer += [seen.entropy, seen.top_1]
            squares += self._gradient_squares(seen)
            of_layer = (seen.load_E, seen.wanted_E, seen.width_D)
            self._lengths[number] = [len(counts) for counts in of_layer]
            self._sizes[number] = sum(self._lengths[number])
            counted += of_layer
        if by_layer:
            counts = torch.cat(counted)
            self._counts = counts if self._counts is None else self._counts.add_(counts)
            values = torch.stack(by_layer).double().view(len(self._sizes), -1)
            sums = torch.cat([sums, values[:, : len(self._names)].sum(0)])
            self._values = values if self._values is None else self._values + values
        if squares:
            square = torch.stack(squares).view(len(self._sizes), -1)
            self._squares = square if self._squares is None else self._squares + square
        self._sums = sums if self._sums is None else self._sums + sums

    def _gradient_squares(self, seen: Observation) -> list[Tensor]:
        """Return WHOLE and every loss; NaN for a loss that does not reach the scores."""
        found = seen.gradient_squares
        if WHOLE not in found:
            return []
        nothing = found[WHOLE].new_full((), float("nan"))
        return [found.get(name, nothing) for name in (WHOLE, *self._names)]

    def record(
        self,
        copies: int,
        part_metrics: dict[str, Tensor] | None = None,
        compute_seconds: float = 0.0,
        stage: dist.ProcessGroup | None = None,
        gradient_squares: Tensor | None = None,
    ) -> StepRecord:
        """Sum over all ranks in one collective, so that all know the same to the last bit.

        copies: how many ranks have each micro batch. stage: the ranks of this pipeline stage, over which is
        summed; None: all ranks. part_metrics: by name, fp64 [layers] on the device, the
        same on every rank (`Part.metrics`). compute_seconds: of this rank; each has a place of its own in the
        sums. gradient_squares: of this rank, an fp64 scalar. float64 carries counts exactly up to 2^53.
        """
        assert self._sums is not None
        device = self._sums.device
        layers, names = list(self._sizes), self._names
        own = part_metrics or {}
        batches = torch.full((1,), float(self.micro_batches), dtype=torch.float64, device=device)
        values = self._values if self._values is not None else batches.new_empty(0, GATE_SUMS)
        # Always of the same size, even where a rank measures no gradients.
        squares = self._squares
        if squares is None:
            squares = batches.new_full((len(layers), len(names) + 1), float("nan"))
        ranks = dist.get_world_size(stage)
        nothing = batches.new_empty(0)
        pieces = [batches, self._sums, values.view(-1), squares.view(-1)]
        pieces.append(nothing if self._mtp is None else self._mtp)
        pieces += [numbers * (copies / ranks) for numbers in own.values()]
        pieces.append(_one_hot_by_rank(compute_seconds * copies, device))
        pieces.append(nothing if gradient_squares is None else gradient_squares.view(1) * copies)
        before = [len(piece) for piece in pieces]
        packed = torch.cat(pieces if self._counts is None else [*pieces, self._counts.double()])
        dist.all_reduce(packed, group=stage)
        packed = packed / copies
        sizes = [*before, *self._sizes.values()]
        parts = iter(packed.cpu().split(sizes))
        micro_batches = next(parts).item()
        lm_sum, tokens, *losses = next(parts).tolist()
        by_name = dict(zip(names, losses, strict=True))
        of_values, of_squares = (next(parts).view(each.shape).tolist() for each in (values, squares))
        mtp_losses, mtp_tokens = next(parts).view(2, -1).tolist()
        of_parts = {name: next(parts).tolist() for name in own}
        compute_seconds_R, of_gradients = next(parts).tolist(), next(parts).tolist()
        records = dict(zip(layers, self._layers(of_values, of_squares, of_parts, parts), strict=True))
        counts_on_device = packed[sum(before) :].long().split(sizes[len(before) :])
        on_device = zip(layers, counts_on_device, strict=True)
        return StepRecord(
            lm_sum=lm_sum,
            tokens=tokens,
            micro_batches=round(micro_batches),
            losses=by_name,
            layers=records,
            mtp=[loss / max(n, 1.0) for loss, n in zip(mtp_losses, mtp_tokens, strict=True)],
            wanted_on_device={number: counts.split(self._lengths[number])[1] for number, counts in on_device},
            compute_seconds_R=compute_seconds_R,
            gradient_squares=of_gradients[0] if of_gradients else None,
        )

    def _layers(
        self,
        values: list[list[float]],
        squares: list[list[float]],
        parts: dict[str, list[float]],
        counts: Iterator[Tensor],
    ) -> Iterator[LayerRecord]:
        """Yield each layer's record from the sums over all ranks."""
        rows = zip(self._sizes, values, squares, counts, strict=True)
        for place, (number, numbers, (whole, *each), packed) in enumerate(rows):
            weights = self._weights[number]
            load_E, wanted_E, width_D = packed.long().split(self._lengths[number])
            *losses, entropy, top_1 = numbers
            ratios = {
                n: (s / whole) ** 0.5 for n, s in zip(self._names, each, strict=True) if s == s and whole
            }
            yield LayerRecord(
                load_E,
                wanted_E[: len(load_E)],
                width_D,
                entropy=entropy,
                top_1=top_1,
                losses={n: loss for n, loss in zip(self._names, losses, strict=True) if n in weights},
                loss_weights=weights,
                gradient_shares=ratios,
                part_metrics={n: of[place] for n, of in parts.items() if of[place] == of[place]},
            )


def _one_hot_by_rank(number: float, device: torch.device) -> Tensor:
    """Return this rank's number at its place among those of all ranks, fp64 [ranks]; the others are 0."""
    numbers_R = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    numbers_R.narrow(0, dist.get_rank(), 1).fill_(number)  # an assignment would wait for the device
    return numbers_R


def measured_parameters(model: HasMoELayers) -> list[nn.Parameter]:
    """Return the parameters of the parts that declare metrics."""
    parts = [part for _, layer in model.moe_layers() for part in layer.measured_parts().values()]
    return [parameter for part in parts for parameter in part.parameters()]


@torch.no_grad()
def part_metrics(model: HasMoELayers) -> dict[str, Tensor]:
    """Return the parts' own numbers (`Part.metrics`) of all layers by name, fp64 [layers], on the device; NaN
    where a layer does not have the part.
    """
    found: dict[str, dict[int, Tensor]] = {}
    layers = [layer for _, layer in model.moe_layers()]
    for place, layer in enumerate(layers):
        for name, part in layer.measured_parts().items():
            for metric, value in part.metrics().items():
                found.setdefault(f"{name.removeprefix('router.')}/{metric}", {})[place] = value
    return {name: _stacked(values, len(layers)) for name, values in found.items()}


def _stacked(found: dict[int, Tensor], count: int) -> Tensor:
    """Return scalars by their places as one fp64 vector; those of one dtype are converted together."""
    values = list(found.values())
    if len(values) < count:
        nothing = values[0].new_full((), float("nan"), dtype=torch.float64)
        values = [found.get(place, nothing) for place in range(count)]
    alike = len({value.dtype for value in values}) == 1
    return torch.stack(values if alike else [value.double() for value in values]).double()


class MultiTokenLosses:
    """The losses of a model's D depths beside its own; a model without them has D = 0.

    weight: of each depth's mean loss: DeepSeek-V3's lambda / D (2412.19437, equation 25).
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.weight = model.depth_weight / max(model.depth, 1)

    def scales(self, batches: list[Batch], engine: Engine) -> Tensor:
        """Return the number of replicas over the batch's unmasked tokens, fp32 [1 + D]. Collective.

        The first is of the model itself, the others of its depths. batches: this rank's.
        """
        counted = torch.stack([self._masks(batch).sum((1, 2), dtype=torch.float64) for batch in batches])
        # Not torch.tensor, whose copy to a GPU the host waits for.
        numbers = [
            torch.full((1,), number, dtype=torch.float64, device=engine.world.device)
            for number in counted.sum(0).tolist()
        ]
        tokens_K = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
        dist.all_reduce(tokens_K, group=engine.data_group)
        return (engine.layout.replicas / tokens_K.clamp(min=1)).float()

    def sums(self, batch: Batch, rollouts: int) -> tuple[Tensor, Tensor] | None:
        """Return each depth's sum over the unmasked tokens of the last micro batch, and their number, [D].

        rollouts: how often the batch holds each sequence. None for a model without depths.
        """
        losses_DBS = self.model.take_multi_token_losses()
        if losses_DBS is None:
            return None
        masks_DBS = self._masks(batch)[1:]
        if (shard := self.model.context_shard) is not None:
            masks_DBS = shard.own(masks_DBS, dim=2)
        return (losses_DBS * masks_DBS).sum((1, 2)) / rollouts, masks_DBS.sum((1, 2)).double() / rollouts

    def weighted(self, means_D: Tensor) -> Tensor:
        """Return what the depths' mean losses add to the loss, a scalar."""
        return self.weight * means_D.sum()

    def _masks(self, batch: Batch) -> Tensor:
        return prediction_masks(batch.loss_mask_BS, batch.position_ids_BS, self.model.depth)
