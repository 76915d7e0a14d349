"""The base class of losses whose coefficient follows what the whole batch of a step showed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.part import Dims, Part, StepContext


class AdaptiveLoss(Part):
    """A loss times a coefficient c, relative to the `weight` of its options, that changes after each step.

    c, fp32, is a buffer that starts at 1: checkpoints save it. It changes by counts over all micro batches
    and data-parallel ranks of the step, so that it is the same on all ranks. Each MoE layer has its own.
    """

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        self.coefficient: Tensor
        self.register_buffer("coefficient", torch.ones((), dtype=torch.float32))
        self._step: int | None = None
        # Micro batch of the current step -> its counts: a block that is recomputed counts once.
        self._counts: dict[int, Tensor] = {}

    def metrics(self) -> dict[str, Tensor]:
        """Return the loss's whole factor, weight times c."""
        return {"coefficient": self.config.weight * self.coefficient.float()}

    def remember(self, counts: list[Tensor | int], context: StepContext) -> None:
        """Take a micro batch's counts, for `adapted`; in training alone."""
        if not self.training:
            return
        if self._step != context.step:
            self._step, self._counts = context.step, {}
        kind: dict[str, Any] = {"dtype": torch.int64, "device": self.coefficient.device}
        self._counts[context.micro_batch] = torch.stack(
            [  # `full` of a number: a copy from the host would wait for the device
                count.to(**kind) if isinstance(count, Tensor) else torch.full((), count, **kind)
                for count in counts
            ]
        )

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Change the coefficient by the step's counts."""
        if not self._counts or self._step != context.step:
            return
        total = torch.stack([*self._counts.values()]).sum(dim=0)
        if context.data_group is not None:
            dist.all_reduce(total, group=context.data_group)
        self.coefficient.copy_(self.adapted(self.coefficient.float(), total))
        self._counts = {}

    def adapted(self, coefficient: Tensor, total: Tensor) -> Tensor:
        """Return the next c; total: int64, the sums of what `remember` took."""
        raise NotImplementedError(f"{type(self).__name__} must define adapted")
