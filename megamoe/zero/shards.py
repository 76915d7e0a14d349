"""What ZeRO has cut: parameters whole again for a while, and the optimiser's share of this rank."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_set_full_fp32_param
from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import (
    FlatRange,
    is_absent,
    is_cut,
    ranges_at_zero1,
    ranges_at_zero3,
    set_sliced_master,
    slice_of,
    slice_values,
)


@dataclass(frozen=True)
class Fragment:
    """Part of a parameter in a tensor that the optimiser steps on.

    Elements [start, start + numel) of the flattened parameter lie at [at, at + numel) of the flattened
    `tensor`, whose moments lie alike.
    """

    parameter: nn.Parameter
    tensor: Tensor
    at: int
    start: int
    numel: int

    def of(self, tensor: Tensor) -> Tensor:
        """Its elements of `tensor`, or of a moment, as a flat view."""
        return tensor.detach().view(-1).narrow(0, self.at, self.numel)


@dataclass(frozen=True)
class Shard:
    """One parameter group's tensors that the optimiser steps on; their state is in `optimizer.state`.

    fragments: what of which parameters lies in them; the rest is padding. fleeting: they are in memory until
    the next shard only.
    """

    tensors: list[Tensor]
    fragments: list[Fragment]
    fleeting: bool = False


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, every parameter is whole, to be read and not written.

    Collective over the ranks that hold its slices, and null where ZeRO 3 does not cut it.
    """
    cut = [p for p in parameters if is_absent(p)]
    with GatheredParameters(cut, enabled=bool(cut)):
        yield


def held_part(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """What this rank holds of a parameter's flattened elements, and which is the first of them."""
    if not is_cut(parameter):
        return parameter.detach().view(-1), 0
    return slice_values(parameter), slice_of(parameter)[0]


@torch.no_grad()
def set_weight(parameter: nn.Parameter, value: Tensor) -> None:
    """parameter := value, whole and the same on all ranks that hold it; collective at ZeRO 3."""
    if not is_cut(parameter):
        parameter.copy_(value)
        return
    with GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(value)


@torch.no_grad()
def set_master(parameter: nn.Parameter, value: Tensor) -> None:
    """The parameter's fp32 master under ZeRO 1, 2 or 3 := value, whole and the same on all ranks."""
    if not is_cut(parameter):
        safe_set_full_fp32_param(parameter, value)
    else:
        set_sliced_master(parameter, value)


def optimizer_shards(wrapper: Any, optimizer: torch.optim.Optimizer, stage: int) -> Iterator[Shard]:
    """wrapper: DeepSpeed's optimiser around the torch one, or the torch one itself at stage 0."""
    if stage == 0:
        yield from _shards_at_zero0(optimizer)
    elif stage < 3:
        yield from _shards_at_zero1(wrapper, optimizer)
    else:
        yield from _shards_at_zero3(wrapper)


def _shards_at_zero0(optimizer: torch.optim.Optimizer) -> Iterator[Shard]:
    """Each parameter, or its fp32 master, by itself."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    parameters = getattr(optimizer, "model_parameters", tensors)
    pairs = zip(parameters, tensors, strict=True)
    yield Shard(tensors, [Fragment(parameter, t, 0, 0, t.numel()) for parameter, t in pairs])


def _shards_at_zero1(wrapper: Any, optimizer: torch.optim.Optimizer) -> Iterator[Shard]:
    """A flat range of each group."""
    for ranges, group in zip(ranges_at_zero1(wrapper), optimizer.param_groups, strict=True):
        (flat,) = group["params"]
        yield Shard([flat], _fragments(flat, ranges))


def _shards_at_zero3(wrapper: Any) -> Iterator[Shard]:
    """A slice of each parameter, one after the other, by sub-groups."""
    for flat, ranges, on_disk in ranges_at_zero3(wrapper):
        yield Shard([flat], _fragments(flat, ranges), fleeting=on_disk)


def _fragments(flat: Tensor, ranges: list[FlatRange]) -> list[Fragment]:
    return [Fragment(each.parameter, flat, each.at, each.start, each.numel) for each in ranges]
