"""The least that the optimiser takes for so many parameters: PyTorch's, on one flat fp32 tensor."""

import torch

from common.timers import clock
from megamoe.config.schema import OptimizerConfig
from megamoe.optim.optimizers import adamw_options
from steps.candidate import StepTime


class FlatAdamW:
    """Clipping by the norm, then the fused update; in bf16, rounded by one copy too.

    Its gradient stays where it is.
    """

    def __init__(self, size: int, config: OptimizerConfig, precision: str, device: torch.device) -> None:
        self.parameters = self.updated = size
        self.clip = config.grad_clip
        weight = torch.nn.Parameter(torch.randn(size, device=device))
        weight.grad = 1e-3 * torch.randn(size, device=device)
        options = adamw_options(config)
        self.weight = weight
        self.rounded = weight.detach().bfloat16() if precision == "bf16" else None
        self.optimizer = torch.optim.AdamW([weight], **options)

    @torch.no_grad()
    def step(self, _: int) -> StepTime:
        """Take a step of the optimiser alone."""
        started = clock()
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_([self.weight], self.clip)
        clipped = clock()
        self.optimizer.step()
        if self.rounded is not None:
            self.rounded.copy_(self.weight)
        ended = clock()
        whole, update = ended - started, ended - clipped
        return StepTime(data=0.0, forward=0.0, backward=0.0, optimizer=whole, update=update, total=whole)

    def close(self) -> None:
        """Nothing is open."""
