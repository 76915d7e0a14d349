"""Gradients of what every tensor-parallel rank holds whole but sees some of the tokens only."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TensorParallelGradientSync:
    """Sums such gradients over the tensor-parallel group, once an optimiser step.

    Norms and biases under sequence parallelism, routers and shared experts under any tensor parallelism: the
    parameters that bear Megatron-Core's mark `sequence_parallel`. Its own trainer sums them after the last
    backward; DeepSpeed has by then put the gradients into buckets, so here a hook does it as each gradient
    arrives. Until `last` is set, for the step's last micro batch, what arrives is kept aside in fp32.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.last = True
        self._aside: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if getattr(parameter, "sequence_parallel", False) and parameter.requires_grad:
                parameter.register_hook(self._hook_of(name))

    def check_all_summed(self) -> None:
        """To be called after the last micro batch's backward.

        Raises:
            RuntimeError: if a parameter had a gradient in an earlier micro batch and none in the last.
        """
        if self._aside:
            raise RuntimeError(
                f"{min(self._aside)} had a gradient in one micro batch of the step, but none in the last; "
                "under tensor parallelism a part must use its parameters in every micro batch"
            )

    def _hook_of(self, name: str) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def hook(gradient: Tensor) -> Tensor:
            before = self._aside.pop(name, None)
            total = gradient.to(torch.float32, copy=True) if before is None else before.add_(gradient)
            if not self.last:
                self._aside[name] = total
                return torch.zeros_like(gradient)
            dist.all_reduce(total, group=self.group)
            return total.to(gradient.dtype)

        return hook
