"""The loss of each token, from logits whose vocabulary may be split over the tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamoe.kernels.choice import Kernels
from megamoe.kernels.cross_entropy import Sums, Target, statistics, write_gradient


def token_losses(logits_SBV: Tensor, labels_SB: Tensor, label_smoothing: float, kernels: Kernels) -> Tensor:
    """Return the cross entropy of each label, fp32 [S, B], in nats. It may write into the logits.

    logits_SBV: this rank's words, in the model's dtype. labels_SB: int64, of the whole vocabulary. Smoothing
    gives a share a of the target evenly to the other of the V words, padding included.
    """
    if logits_SBV.device.type == "cpu":
        return whole_token_losses(logits_SBV.float(), labels_SB, label_smoothing)
    return narrow_token_losses(logits_SBV, labels_SB, label_smoothing, kernels)


def whole_token_losses(logits_SBV: Tensor, labels_SB: Tensor, label_smoothing: float) -> Tensor:
    """Compute `token_losses` from fp32 logits by Megatron-Core's cross entropy.

    Its own smoothing takes the mean over one rank's words alone. Its cross entropy writes into the logits, so
    what needs them comes first. For the formula see `smoothing_of`.
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


def narrow_token_losses(
    logits_SBV: Tensor, labels_SB: Tensor, label_smoothing: float, kernels: Kernels
) -> Tensor:
    """Compute `token_losses` without a second tensor of the logits' shape, in fp32 or in their dtype.

    The backward pass writes the gradient over the logits: it can run once.
    """
    words = logits_SBV.shape[-1]
    local_SB = labels_SB - get_tensor_model_parallel_rank() * words
    vocabulary = words * get_tensor_model_parallel_world_size()
    smoothing = smoothing_of(label_smoothing, vocabulary)
    losses_SB: Tensor = _TokenLosses.apply(
        logits_SBV, local_SB, smoothing, vocabulary, get_tensor_model_parallel_group(), kernels
    )
    return losses_SB


def smoothing_of(share: float, vocabulary: int) -> float:
    """Return s of the loss CE + s (z_label - mean_v z_v), if a share of the target goes to the other words.

    With s = share V / (V - 1), (1 - s) CE - s mean_v log p_v is that loss.
    """
    return share * vocabulary / (vocabulary - 1) if share else 0.0


class _TokenLosses(torch.autograd.Function):
    """The loss of each token from the statistics of all ranks' words."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_SBV: Tensor,
        label_SB: Tensor,
        smoothing: float,
        vocabulary: int,
        group: dist.ProcessGroup,
        kernels: Kernels,
    ) -> Tensor:
        logits_TV = logits_SBV.contiguous().view(-1, logits_SBV.shape[-1])
        label_T = label_SB.reshape(-1).contiguous()
        found = statistics(logits_TV, label_T, kernels)
        largest_T, parts_3T = found.largest_T, torch.stack(found[1:])
        if dist.get_world_size(group) > 1:
            largest_T = found.largest_T.clone()
            dist.all_reduce(largest_T, op=dist.ReduceOp.MAX, group=group)
            parts_3T[0] *= (found.largest_T - largest_T).exp()
            dist.all_reduce(parts_3T, group=group)
        sum_T, label_logit_T, total_T = parts_3T
        ctx.sums = Sums(largest_T, sum_T.reciprocal())
        ctx.target = Target(1 - smoothing, smoothing / vocabulary)
        ctx.kernels, ctx.was_written = kernels, False
        ctx.save_for_backward(logits_TV, label_T)
        losses_T = sum_T.log() - (label_logit_T - largest_T)
        if smoothing:
            losses_T += smoothing * (label_logit_T - total_T / vocabulary)
        return losses_T.view(label_SB.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SB: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.was_written:
            raise RuntimeError("the backward pass of token_losses writes over the logits, and can run once")
        ctx.was_written = True
        logits_TV, label_T = ctx.saved_tensors
        sent_T = gradient_SB.reshape(-1).float().contiguous()
        to_logits_TV = write_gradient(logits_TV, label_T, ctx.sums, sent_T, ctx.target, ctx.kernels)
        return to_logits_TV.view(*gradient_SB.shape, -1), None, None, None, None, None
