"""What belongs to each of two micro batches in flight, and is exchanged when they take turns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.compat.torch_compat import seed_torch
from megamoe.moe.context import MicroBatch
from megamoe.moe.part import StepContext
from megamoe.moe.timers import LocalComputeTimer


@dataclass(frozen=True)
class PassState:
    """What a forward pass finds again when it goes on.

    batch, compute_timer: of the context. stage: what `StageTimers.pause` has returned. random, cuda:
    torch's random states.
    """

    batch: MicroBatch
    compute_timer: LocalComputeTimer
    stage: str | None
    random: Tensor
    cuda: Tensor | None

    @classmethod
    def leave(cls, context: StepContext, device: torch.device) -> "PassState":
        """Return the state of the pass that hands over."""
        return cls(
            context.batch,
            context.compute_timer,
            None if context.timers is None else context.timers.pause(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def enter(self, context: StepContext, device: torch.device) -> None:
        """Put it back."""
        context.batch = self.batch
        context.compute_timer = self.compute_timer
        if context.timers is not None:
            context.timers.resume(self.stage)
        torch.set_rng_state(self.random)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


def begin_second(context: StepContext, seed: int, device: torch.device) -> None:
    """Begin the second pass: with draws of its own, and without a part in the timer of the first micro
    batch.
    """
    context.compute_timer = LocalComputeTimer(device)
    seed_torch(seed)
