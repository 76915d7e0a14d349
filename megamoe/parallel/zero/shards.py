"""Access to what ZeRO partitions: gathered parameters, and this rank's part of the optimiser state."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_set_full_fp32_param
from torch import Tensor, nn

from megamoe.compat import deepspeed_zero


@dataclass(frozen=True)
class Fragment:
    """Part of a parameter inside a tensor that the optimiser updates.

    Elements [start, start + numel) of the flattened parameter are at [at, at + numel) of the flattened
    `tensor`; its moments have the same layout.
    """

    parameter: nn.Parameter
    tensor: Tensor
    at: int
    start: int
    numel: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return its elements of `tensor`, or of a moment, as a flat view."""
        return tensor.detach().view(-1).narrow(0, self.at, self.numel)


@dataclass(frozen=True)
class Shard:
    """The tensors of one parameter group that the optimiser updates; their state is in `optimizer.state`.

    fragments: the parameters' elements in these tensors; the rest is padding. Tensors that are kept on disk
    are in memory only until the next shard is read.
    """

    tensors: list[Tensor]
    fragments: list[Fragment]


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which every parameter is whole and read-only.

    Collective over the ranks that hold its parts; no operation for parameters that ZeRO 3 does not partition.
    """
    cut = [p for p in parameters if deepspeed_zero.is_absent(p)]
    with GatheredParameters(cut, enabled=bool(cut)):
        yield


def held_part(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Return this rank's elements of the flattened parameter, and the index of the first of them."""
    if not deepspeed_zero.is_cut(parameter):
        return parameter.detach().view(-1), 0
    return deepspeed_zero.slice_values(parameter), deepspeed_zero.slice_of(parameter)[0]


@torch.no_grad()
def set_weight(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter to a whole value that is the same on all its ranks; collective at ZeRO 3."""
    if not deepspeed_zero.is_cut(parameter):
        parameter.copy_(value)
        return
    with GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(value)


@torch.no_grad()
def set_master(parameter: nn.Parameter, value: Tensor) -> None:
    """Set the fp32 master under ZeRO 1, 2 or 3 to a whole value that is the same on all its ranks."""
    if not deepspeed_zero.is_cut(parameter):
        safe_set_full_fp32_param(parameter, value)
    else:
        deepspeed_zero.set_sliced_master(parameter, value)


def optimizer_shards(
    wrapper: Any, optimizer: torch.optim.Optimizer, stage: int, values: bool = True
) -> Iterator[Shard]:
    """Yield this rank's shards.

    They are one with all parameters or fp32 masters at stage 0, one for each parameter group at stages 1 and
    2, and one for each of DeepSpeed's sub-groups at stage 3.

    wrapper: DeepSpeed's optimiser around torch's, or torch's alone at stage 0. values: without them, tensors
    that are on disk stay there.
    """
    if stage == 0:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        pairs = zip(getattr(optimizer, "model_parameters", tensors), tensors, strict=True)
        yield Shard(tensors, [Fragment(parameter, t, 0, 0, t.numel()) for parameter, t in pairs])
    elif stage < 3:
        for ranges, group in zip(
            deepspeed_zero.ranges_at_zero1(wrapper), optimizer.param_groups, strict=True
        ):
            (flat,) = group["params"]
            yield Shard([flat], _fragments(flat, ranges))
    else:
        for flat, ranges in deepspeed_zero.ranges_at_zero3(wrapper, values):
            yield Shard([flat], _fragments(flat, ranges))


def _fragments(flat: Tensor, ranges: list[deepspeed_zero.FlatRange]) -> list[Fragment]:
    return [Fragment(each.parameter, flat, each.at, each.start, each.numel) for each in ranges]
