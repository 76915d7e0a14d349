"""What ZeRO has cut: parameters whole again for a while, and the optimiser's share of this rank."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from torch import Tensor, nn
from torch.nn import functional


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
    cut = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with GatheredParameters(cut, enabled=bool(cut)):
        yield


def held_part(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """What this rank holds of a parameter's flattened elements, and which is the first of them."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().view(-1), 0
    start, numel = _slice_at_zero3(parameter)
    return parameter.ds_tensor.detach().view(-1).narrow(0, 0, numel), start  # type: ignore[attr-defined]


def _slice_at_zero3(parameter: Any) -> tuple[int, int]:
    """(first element, how many) of this rank's slice; the last ranks' may be short or empty."""
    each = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank(parameter.ds_process_group) * each, parameter.ds_numel)
    return start, min(each, parameter.ds_numel - start)


@torch.no_grad()
def set_weight(parameter: nn.Parameter, value: Tensor) -> None:
    """parameter := value, whole and the same on all ranks that hold it; collective at ZeRO 3."""
    if not hasattr(parameter, "ds_id"):
        parameter.copy_(value)
        return
    with GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(value)


@torch.no_grad()
def set_master(parameter: nn.Parameter, value: Tensor) -> None:
    """The parameter's fp32 master under ZeRO 1, 2 or 3 := value, whole and the same on all ranks."""
    if not hasattr(parameter, "ds_id"):
        safe_set_full_fp32_param(parameter, value)
        return
    size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
    group = parameter.ds_process_group  # type: ignore[attr-defined]
    # DeepSpeed's own setter reads past the end where the slices do not fill the last rank's.
    padded = functional.pad(value.flatten(), (0, size * dist.get_world_size(group) - value.numel()))
    safe_set_local_fp32_param(parameter, padded.narrow(0, size * dist.get_rank(group), size))


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
    """A flat range of each group; ZeRO 1 in bf16 and the others name their lists differently."""
    groups = wrapper.bf16_groups if hasattr(wrapper, "bf16_groups") else wrapper.bit16_groups
    for parameters, group in zip(groups, optimizer.param_groups, strict=True):
        (flat,) = group["params"]
        fragments = []
        for parameter in parameters:
            mapping = parameter._hp_mapping  # None where no element of it is in this rank's range
            if mapping is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                fragments.append(Fragment(parameter, flat, here.start, there.start, here.numel))
        yield Shard([flat], fragments)


def _shards_at_zero3(wrapper: Any) -> Iterator[Shard]:
    """A slice of each parameter, one after the other, by sub-groups."""
    for number, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
        on_disk = wrapper._swappable_optimizer_subgroup(number)
        if on_disk:
            wrapper._optimizer_states_and_gradient_swap_in(number)
        fragments = []
        for parameter in wrapper.fp16_groups[number]:
            start, numel = _slice_at_zero3(parameter)
            at = wrapper.grad_position[wrapper.get_param_id(parameter)][1]
            fragments += [Fragment(parameter, flat, at, start, numel)] if numel else []
        yield Shard([flat], fragments, fleeting=on_disk)
        if on_disk:
            wrapper._optimizer_states_and_gradient_swap_out(number)
