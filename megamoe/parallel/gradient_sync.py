"""Sums the gradients of replicated parameters that see only a part of the tokens on each tensor-parallel
rank.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TensorParallelGradientSync:
    """Sums such gradients over the tensor-parallel group, once per optimiser step.

    They belong to norms and biases under sequence parallelism, and to routers and shared experts under any
    tensor parallelism: the parameters with Megatron-Core's mark `sequence_parallel`. Megatron-Core sums them
    after the last backward, but then DeepSpeed has already put the gradients into buckets. So a hook sums
    each gradient when it is complete. Until `last` is set, for the step's last micro batch, gradients are
    accumulated separately in fp32.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.last = True
        self._aside: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if getattr(parameter, "sequence_parallel", False) and parameter.requires_grad:
                parameter.register_hook(self._hook_of(name))

    def check_all_summed(self) -> None:
        """Check that every gradient was summed; to be called after the last micro batch's backward.

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
