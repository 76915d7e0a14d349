"""Gradients at ZeRO 1 in bf16 on CUDA: reduced to the rank that updates with them, beside the backward pass.

DeepSpeed sums all gradients on every rank, though each rank updates its own part alone. Here each rank gets
the sum of its part (Rajbhandari et al. 2020, ZeRO, section 7.1): half the traffic, and norm, clipping and
scaling on that part. Gradients are accumulated and reduced in fp32. The update multiplies them by one factor,
which combines the division by the number of ranks and clipping.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.compat import deepspeed_zero
from megamoe.kernels.adamw import sum_of_squares
from megamoe.kernels.choice import Kernels


class ScatteredGradients:
    """The gradients of DeepSpeed's ZeRO 1 in bf16, for ranks that all hold the same layers (no tensor parts).

    Every rank must accumulate the gradients of the same parameters, in any order: reductions are launched in
    one order, from the last parameter of the model to the first. With `overlap_comm` they are launched in the
    backward pass of a step's last micro batch, as soon as a gradient is complete; but a parameter group of no
    more elements than `reduce_bucket_size` is reduced at once at the end.

    section: `zero_optimization` of the DeepSpeed file.
    """

    def __init__(self, engine: Any, section: dict[str, Any], grad_clip: float, kernels: Kernels) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._grad_clip, self._kernels = grad_clip, kernels
        bucket = section.get("reduce_bucket_size", 5e8) if section.get("overlap_comm") else math.inf
        self._flat: list[Tensor] = self._optimizer.fp32_groups_gradients_flat
        self._own: list[Tensor] = self._optimizer.fp32_groups_gradient_flat_partition  # this rank's parts
        self._groups: list[dist.ProcessGroup] = self._optimizer.real_dp_process_group
        self._world = dist.get_world_size(self._optimizer.dp_process_group)
        self._order = self._places_from_the_end(engine.module, bucket)
        self._complete: set[tuple[int, int]] = set()  # in the backward pass of the last micro batch
        self._sent: set[tuple[int, int]] = set()
        self._works: list[Any] = []
        self._squares: float | None = None  # over all ranks, from `use_squares`
        deepspeed_zero.give_gradients_to(self, engine)

    @staticmethod
    def serves(optimizer: Any, device: torch.device, tensor_parallel: int) -> bool:
        """Return whether these gradients can be reduced here."""
        return device.type == "cuda" and tensor_parallel == 1 and deepspeed_zero.is_zero1_in_bf16(optimizer)

    def take(self, parameter: nn.Parameter, group: int, place: int) -> None:
        """Accumulate a parameter's gradient; launch the reductions that it completes."""
        gradient, taken = self._optimizer.fp32_groups_gradients[group][place], self._taken[group]
        if (group, place) in self._sent:
            raise RuntimeError("a parameter got a gradient twice in a backward pass: set overlap_comm: false")
        new = parameter.grad.detach().view_as(gradient)  # type: ignore[union-attr]
        gradient.add_(new) if taken[place] else gradient.copy_(new)
        taken[place] = True
        if self._order and self._engine.is_gradient_accumulation_boundary():
            self._complete.add((group, place))
            self._launch(only_complete=True)

    def reduce(self) -> None:
        """Reduce what is left, and let the current stream wait for all of it."""
        self._launch(only_complete=False)
        in_order = {group for group, _ in self._order}
        for group in set(range(len(self._flat))) - in_order:
            for place in range(len(self._taken[group])):
                self._fill(group, place)
            if dist.get_world_size(self._groups[group]) > 1:
                dist.reduce_scatter_tensor(self._own[group], self._flat[group], group=self._groups[group])
        for work in self._works:
            work.wait()
        self._works.clear()

    def own_squares(self) -> Tensor:
        """Return the sum of squares of this rank's part, fp64, before the division by the number of ranks."""
        return sum_of_squares(self._own, self._kernels)

    def use_squares(self, squares: float) -> None:
        """Take the sum of `own_squares` over all ranks for the next step, which then waits for nothing."""
        self._squares = squares

    def step(self) -> None:
        """Update the weights with the clipped mean; a norm that is not finite leaves them as they are."""
        assert self._squares is not None, "the sum of squares over the ranks comes first"
        parts, squares = self._own, self._squares
        self._squares = None
        norm = math.sqrt(squares) / self._world
        if not math.isfinite(norm):
            deepspeed_zero.finish_step(self._optimizer, norm, None)
        else:
            factor = min(1.0, self._grad_clip / (norm + 1e-6)) if self._grad_clip > 0 else 1.0
            deepspeed_zero.finish_step(
                self._optimizer, norm, lambda: self._update(parts, factor / self._world)
            )
        self.clear()

    def clear(self) -> None:
        """Forget the gradients; the next ones overwrite them."""
        for taken in self._taken:
            taken[:] = [False] * len(taken)
        self._complete.clear()
        self._sent.clear()

    def _update(self, parts: list[Tensor], factor: float) -> None:
        for master, part in zip(self._optimizer.fp32_groups_flat_partition, parts, strict=True):
            master.grad = part
        rounded = deepspeed_zero.parts_in_bf16(self._optimizer)
        self._optimizer.optimizer.step(factor=factor, rounded=rounded)

    @property
    def _taken(self) -> list[list[bool]]:
        """Of each group: whether each parameter has a gradient of this step."""
        return self._optimizer.fp32_groups_has_gradients

    def _places_from_the_end(self, module: nn.Module, bucket: float) -> list[tuple[int, int]]:
        """Return (group, place) of the parameters that are reduced one by one, the model's last one first."""
        places = {
            parameter: (number, place)
            for number, parameters in enumerate(deepspeed_zero.parameters_of_groups(self._optimizer))
            for place, parameter in enumerate(parameters)
            if self._flat[number].numel() > bucket
        }
        return [places[parameter] for parameter in reversed([*module.parameters()]) if parameter in places]

    def _launch(self, only_complete: bool) -> None:
        """Reduce parameters in their order, up to the first whose gradient is not complete."""
        for group, place in self._order[len(self._sent) :]:
            if only_complete and (group, place) not in self._complete:
                return
            self._fill(group, place)
            self._sent.add((group, place))
            if dist.get_world_size(self._groups[group]) > 1:
                for owner, part in self._parts(group, place):
                    self._works.append(
                        dist.reduce(part, group=self._groups[group], group_dst=owner, async_op=True)
                    )

    def _fill(self, group: int, place: int) -> None:
        """Overwrite the last step's gradient of a parameter that has none in this one."""
        if not self._taken[group][place]:
            self._optimizer.fp32_groups_gradients[group][place].zero_()

    def _parts(self, group: int, place: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank of the group, its elements) of a parameter's gradient."""
        flat, gradient = self._flat[group], self._optimizer.fp32_groups_gradients[group][place]
        size = flat.numel() // dist.get_world_size(self._groups[group])
        start = gradient.storage_offset() - flat.storage_offset()
        end = start + gradient.numel()
        while start < end:
            until = min(end, (start // size + 1) * size)
            yield start // size, flat[start:until]
            start = until
