"""A batch of the data as the MoE layers know it, and what two micro batches in flight exchange in turn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.compat.torch_compat import seed_torch
from megamoe.data.batches import Batch
from megamoe.moe.context import MicroBatch, Padding
from megamoe.moe.part import StepContext
from megamoe.moe.timers import LocalComputeTimer

ROLLOUT_BIT = 48  # of a token's index, above the number of any token in the data
PADDED_STRIDE = 2**24  # of token indices, where the length of the batch must have no influence


def micro_batch_of(batch: Batch, number: int, rollouts: int = 1) -> MicroBatch:
    """Return the micro batch in a block's token order (s * B + b).

    number: the micro batch's number in the run, over all ranks. `batch` holds every sequence `rollouts`
    times, each with separate draws.
    """
    num_sequences, length = batch.tokens_BS.shape
    device = batch.tokens_BS.device
    sample_B = batch.sample_index_B.to(device)
    padded = batch.lengths_B is not None
    return MicroBatch(
        token_index_T=_padded_index_T(sample_B, length) if padded else _index_T(sample_B, length, rollouts),
        token_ids_T=_by_position(batch.tokens_BS),
        position_T=_by_position(batch.position_ids_BS),
        sample_index_B=sample_B,
        number=number,
        num_rollouts=rollouts,
        padding=None if batch.lengths_B is None else Padding.of(batch.lengths_B, length, device),
        source=_source(batch, sample_B, num_sequences),
    )


def _source(batch: Batch, sample_B: Tensor, num_sequences: int) -> MicroBatch | None:
    """Return the tokens of the encoder of an encoder_decoder."""
    if batch.source_BL is None or batch.source_lengths_B is None:
        return None
    length, device = batch.source_BL.shape[1], batch.source_BL.device
    return MicroBatch(
        _padded_index_T(sample_B, length),
        _by_position(batch.source_BL),
        torch.arange(length, device=device).repeat_interleave(num_sequences),
        sample_B,
        padding=Padding.of(batch.source_lengths_B, length, device),
    )


def _by_position(values_BS: Tensor) -> Tensor:
    return values_BS.transpose(0, 1).reshape(-1)


def _index_T(sample_B: Tensor, length: int, rollouts: int) -> Tensor:
    num_sequences, device = len(sample_B), sample_B.device
    position_S = torch.arange(length, device=device)
    rollout_B = torch.arange(num_sequences, device=device) // (num_sequences // rollouts)
    index_SB = sample_B[None, :] * length + position_S[:, None] + (rollout_B[None, :] << ROLLOUT_BIT)
    return index_SB.reshape(-1)


def _padded_index_T(sample_B: Tensor, length: int) -> Tensor:
    """Return token indices, int64 [S * B], that do not depend on how far a sequence is filled up."""
    position_S = torch.arange(length, device=sample_B.device)
    return (sample_B[None, :] * PADDED_STRIDE + position_S[:, None]).reshape(-1)


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
