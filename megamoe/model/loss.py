"""The loss of each token, from logits whose vocabulary may be split over the tensor-parallel ranks."""

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor


def token_losses(logits_SBV: Tensor, labels_SB: Tensor, label_smoothing: float) -> Tensor:
    """fp32 logits [S, B, vocabulary slice], int64 labels of the whole vocabulary -> fp32 [S, B], in nats.

    Smoothing gives a share a of the target evenly to the other of the V tokens (padding included): with s = a
    V / (V - 1),  (1 - s) CE - s mean_v log p_v  =  CE + s (z_label - mean_v z_v). Megatron-Core's own
    smoothing takes the mean over one rank's slice only. Its cross entropy overwrites the logits, so the terms
    that need them are computed first.
    """
    if label_smoothing == 0:
        losses: Tensor = vocab_parallel_cross_entropy(logits_SBV, labels_SB)
        return losses
    words = logits_SBV.shape[-1]
    local_SB = labels_SB - get_tensor_model_parallel_rank() * words
    here_SB = (local_SB >= 0) & (local_SB < words)
    label_logit_SB = logits_SBV.gather(-1, local_SB.clamp(0, words - 1)[..., None])[..., 0]
    label_logit_SB = label_logit_SB.masked_fill(~here_SB, 0)
    sums = torch.stack([label_logit_SB, logits_SBV.sum(-1), torch.full_like(label_logit_SB, words)])
    label_SB, sum_SB, vocabulary_SB = reduce_from_tensor_model_parallel_region(sums)
    smoothing_SB = label_smoothing * vocabulary_SB / (vocabulary_SB - 1)
    losses = vocab_parallel_cross_entropy(logits_SBV.clone(), labels_SB)
    return losses + smoothing_SB * (label_SB - sum_SB / vocabulary_SB)
