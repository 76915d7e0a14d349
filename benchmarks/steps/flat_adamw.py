"""The least that an update of so many parameters takes: AdamW, fused, on one flat fp32 tensor."""

import torch

from common.timers import clock
from megamoe.config.schema import OptimizerConfig
from megamoe.parallel.zero.optimizer import adamw_options
from steps.candidate import StepTime


class FlatAdamW:
    """The update alone: no norm, no clipping, and its gradient stays where it is."""

    def __init__(self, size: int, config: OptimizerConfig, device: torch.device) -> None:
        self.parameters = self.updated = size
        weight = torch.nn.Parameter(torch.randn(size, device=device))
        weight.grad = 1e-3 * torch.randn(size, device=device)
        options = adamw_options(config)
        self.optimizer = torch.optim.AdamW([weight], **options)

    def step(self, _: int) -> StepTime:
        """One update."""
        started = clock()
        self.optimizer.step()
        seconds = clock() - started
        return StepTime(data=0.0, forward=0.0, backward=0.0, optimizer=seconds, total=seconds)

    def close(self) -> None:
        """Nothing is open."""
