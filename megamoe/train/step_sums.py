"""The sums of a step, kept on the device: one collective and one copy to the host make them a record."""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.layer import MoELayer
from megamoe.train.step_record import LayerLoad, StepRecord


class HasMoELayers(Protocol):
    """A model, as far as its sums need it."""

    def moe_layers(self) -> Iterable[tuple[int, MoELayer]]: ...


class StepSums:
    """What this rank's micro batches of one step add up to. Only `record` waits for the device."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.layers: dict[int, LayerLoad] = {}  # on the device
        self._names: list[str] = []  # of the auxiliary losses, the same in every layer
        self._weights: dict[str, float] = {}
        self._sums: Tensor | None = None  # fp64: lm loss, tokens, and the losses of _names

    def add(self, model: HasMoELayers, lm_sum: Tensor, tokens: Tensor) -> None:
        """Take in one micro batch after its forward pass; lm_sum, tokens: scalars on the device."""
        self.micro_batches += 1
        values = [lm_sum, tokens]
        by_layer: list[Tensor] = []
        for number, layer in model.moe_layers():
            seen = layer.observation
            assert seen is not None
            self._weights = layer.loss_weights
            self._names = sorted(seen.losses)
            by_layer += [seen.losses[name].detach() for name in self._names]
            known = self.layers.get(number)
            if known is None:  # replaced below, never written: the layer still holds them
                self.layers[number] = LayerLoad(seen.load_E, seen.wanted_E)
            else:
                known.load_E = known.load_E + seen.load_E
                known.wanted_E = known.wanted_E + seen.wanted_E
        sums = torch.stack([value.detach().double() for value in values])
        if by_layer:
            sums = torch.cat([sums, torch.stack(by_layer).double().view(-1, len(self._names)).sum(0)])
        self._sums = sums if self._sums is None else self._sums + sums

    def record(self, copies: int) -> StepRecord:
        """Sum over all ranks in one collective, so that all know the same to the last bit.

        copies: how many ranks have each micro batch. float64 carries counts exactly up to 2^53.
        """
        assert self._sums is not None
        loads = list(self.layers.values())
        counts = [tensor for load in loads for tensor in (load.load_E, load.wanted_E)]
        batches = torch.full((1,), float(self.micro_batches), dtype=torch.float64, device=self._sums.device)
        packed = torch.cat([batches, self._sums, *([torch.cat(counts).double()] if counts else [])])
        dist.all_reduce(packed)
        packed = packed / copies
        sizes = [3 + len(self._names), *(load.load_E.numel() for load in loads for _ in range(2))]
        parts = packed.cpu().split(sizes)
        micro_batches, lm_sum, tokens, *losses = parts[0].tolist()
        by_name = dict(zip(self._names, losses, strict=True))
        wanted = packed.split(sizes)[2::2]
        return StepRecord(
            lm_sum=lm_sum,
            tokens=tokens,
            micro_batches=round(micro_batches),
            weighted=sum(value * self._weights[name] for name, value in by_name.items()),
            losses=by_name,
            layers={
                number: LayerLoad(parts[1 + 2 * place].long(), parts[2 + 2 * place].long())
                for place, number in enumerate(self.layers)
            },
            wanted_on_device={
                number: wanted_E.long() for number, wanted_E in zip(self.layers, wanted, strict=True)
            },
        )
