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
class Shard:
    """One parameter group's tensors that the optimiser steps on; their state is in `optimizer.state`.

    of_experts: whether they are routed experts'. fleeting: they are in memory until the next shard only.
    """

    of_experts: bool
    parameters: list[Tensor]
    fleeting: bool = False


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, every parameter is whole, to be read and not written.

    Collective over the ranks that hold its slices, and null where ZeRO 3 does not cut it.
    """
    cut = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with GatheredParameters(cut, enabled=bool(cut)):
        yield


def whole_copies(tensors: dict[str, Tensor], wanted: bool) -> dict[str, Tensor]:
    """On the CPU; empty where not wanted. Collective at ZeRO 3, which gathers one after the other."""
    copies = {}
    for name, tensor in tensors.items():
        with gathered([tensor] if isinstance(tensor, nn.Parameter) else []):
            if wanted:
                copies[name] = tensor.detach().to("cpu", copy=True)
    return copies


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
    if stage < 3:
        for group in optimizer.param_groups:
            yield Shard(bool(group.get("moe")), group["params"])
        return
    for number, parameter in enumerate(wrapper.fp32_partitioned_groups_flat):
        group = optimizer.param_groups[wrapper.sub_group_to_group_id[number]]
        on_disk = wrapper._swappable_optimizer_subgroup(number)
        if on_disk:
            wrapper._optimizer_states_and_gradient_swap_in(number)
        yield Shard(bool(group.get("moe")), [parameter], fleeting=on_disk)
        if on_disk:
            wrapper._optimizer_states_and_gradient_swap_out(number)
