"""A batch of the data as the MoE layers know it."""

import torch
from torch import Tensor

from megamoe.data.batches import Batch
from megamoe.moe.context import MicroBatch, Padding

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
