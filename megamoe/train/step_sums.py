"""The losses and sums of a step: kept on the device by name, one collective and one copy to the host."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.data.batches import Batch
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.heads.multi_token_prediction import prediction_masks
from megamoe.moe.layer import MoELayer
from megamoe.moe.observation import Observation
from megamoe.parallel.zero.engine import Engine
from megamoe.train.step_record import LayerRecord, StepRecord


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


class Sums:
    """Vectors by name that are added up over micro batches, and then over ranks in one collective."""

    def __init__(self, vectors: dict[str, Tensor] | None = None) -> None:
        self._vectors = dict(vectors or {})

    def copy(self) -> "Sums":
        """Return sums to which others are added separately."""
        return Sums(self._vectors)

    def add(self, name: str, vector: Tensor) -> None:
        """Add a vector, fp64 or int64 on the device; every rank adds the same names and sizes in a step."""
        known = self._vectors.get(name)
        self._vectors[name] = vector if known is None else known + vector

    def over_ranks(
        self, copies: int, group: dist.ProcessGroup | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums over the ranks of a group divided by `copies`, fp64, on the device and on the host.

        group: None for all ranks. float64 carries counts exactly up to 2^53.
        """
        packed = torch.cat([vector.double() for vector in self._vectors.values()])
        dist.all_reduce(packed, group=group)
        sums = packed / copies
        return self._named(sums), self._named(sums.cpu())

    def _named(self, packed: Tensor) -> dict[str, Tensor]:
        sizes = [len(vector) for vector in self._vectors.values()]
        return dict(zip(self._vectors, packed.split(sizes), strict=True))


class StepSums:
    """What this rank's micro batches of one step add up to. Only `record` waits for the device.

    The layers are in the order of their numbers, the auxiliary losses of any layer in that of their names.
    """

    def __init__(self) -> None:
        self._sums = Sums()
        self._micro_batches = 0
        self._sizes: dict[int, list[int]] = {}  # of each layer: those of load_E, wanted_E and width_D
        self._names: list[str] = []
        self._weights: dict[int, dict[str, float]] = {}  # of each layer's losses
        self._device: torch.device | None = None

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
        self._micro_batches += 1
        self._device = device
        if of_loss is not None:
            self._device = of_loss.lm_sum.device
            lm_sum, tokens = of_loss.lm_sum.detach().double(), of_loss.tokens.double()
            self._sums.add("lm", torch.stack([lm_sum, tokens]))
            if of_loss.mtp is not None:
                self._sums.add("mtp", torch.cat([values.detach().double() for values in of_loss.mtp]))
        if observations:
            self._add_layers(dict(sorted(observations.items())), loss_weights)

    def _add_layers(
        self, observations: dict[int, Observation], loss_weights: dict[int, dict[str, float]]
    ) -> None:
        self._weights = loss_weights
        self._names = sorted({name for seen in observations.values() for name in seen.losses})
        values: list[Tensor] = []
        counts: list[Tensor] = []
        for number, seen in observations.items():
            has_all = len(seen.losses) == len(self._names)
            nothing = seen.entropy if has_all else seen.entropy.new_zeros(())  # in layers without the loss
            values += [seen.losses.get(name, nothing).detach() for name in self._names]
            values += [seen.entropy, seen.top_1]
            counts += [seen.load_E, seen.wanted_E, seen.width_D]
            self._sizes[number] = [len(vector) for vector in counts[-3:]]
        values_L = torch.stack(values).double().view(len(observations), -1)
        self._device = values_L.device
        self._sums.add("losses", values_L[:, : len(self._names)].sum(0))
        self._sums.add("values", values_L.view(-1))
        self._sums.add("counts", torch.cat(counts))

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
        sums. gradient_squares: of this rank, an fp64 scalar.
        """
        sums, ranks, device = self._sums.copy(), dist.get_world_size(stage), self._device
        sums.add(
            "micro batches", torch.full((1,), float(self._micro_batches), dtype=torch.float64, device=device)
        )
        for name, numbers_L in (part_metrics or {}).items():
            sums.add(f"part {name}", numbers_L * (copies / ranks))
        sums.add("seconds", _one_hot_by_rank(compute_seconds * copies, device))
        if gradient_squares is not None:
            sums.add("gradient squares", gradient_squares.view(1) * copies)
        on_device, on_host = sums.over_ranks(copies, stage)
        numbers = {name: vector.tolist() for name, vector in on_host.items() if name != "counts"}
        lm_sum, tokens = numbers.get("lm", (0.0, 0.0))
        mtp = numbers.get("mtp", [])
        depths = len(mtp) // 2
        return StepRecord(
            lm_sum=lm_sum,
            tokens=tokens,
            micro_batches=round(numbers["micro batches"][0]),
            losses=dict(zip(self._names, numbers.get("losses", []), strict=True)),
            layers=dict(self._layers(numbers, on_host)),
            mtp=[loss / max(n, 1.0) for loss, n in zip(mtp[:depths], mtp[depths:], strict=True)],
            wanted_on_device={number: wanted_E for number, (_, wanted_E, _) in self._counts(on_device)},
            compute_seconds_R=numbers["seconds"],
            gradient_squares=numbers.get("gradient squares", [None])[0],
        )

    def _counts(self, sums: dict[str, Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield each layer's load_E, wanted_E and width_D, int64."""
        if self._sizes:
            of_layers = sums["counts"].long().split([sum(sizes) for sizes in self._sizes.values()])
            for (number, sizes), vector in zip(self._sizes.items(), of_layers, strict=True):
                yield number, vector.split(sizes)

    def _layers(
        self, numbers: dict[str, Any], on_host: dict[str, Tensor]
    ) -> Iterator[tuple[int, LayerRecord]]:
        """Yield each layer's record from the sums over all ranks."""
        names, parts = self._names, {name[5:]: of for name, of in numbers.items() if name.startswith("part ")}
        for index, (number, (load_E, wanted_E, width_D)) in enumerate(self._counts(on_host)):
            weights, row = self._weights[number], index * (len(names) + 2)
            *losses, entropy, top_1 = numbers["values"][row : row + len(names) + 2]
            yield (
                number,
                LayerRecord(
                    load_E,
                    wanted_E[: len(load_E)],
                    width_D,
                    entropy=entropy,
                    top_1=top_1,
                    losses={n: loss for n, loss in zip(names, losses, strict=True) if n in weights},
                    loss_weights=weights,
                    part_metrics={n: of[index] for n, of in parts.items() if of[index] == of[index]},
                ),
            )


def _one_hot_by_rank(number: float, device: torch.device | None) -> Tensor:
    """Return this rank's number at its place among those of all ranks, fp64 [ranks]; the others are 0."""
    numbers_R = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    numbers_R.narrow(0, dist.get_rank(), 1).fill_(number)  # an assignment would wait for the device
    return numbers_R


class HasMoELayers(Protocol):
    """A model, as far as its sums need it."""

    def moe_layers(self) -> Iterable[tuple[int, MoELayer]]: ...


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
