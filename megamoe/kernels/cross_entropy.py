"""Cross entropy over a vocabulary, without a tensor of [tokens, vocabulary] in fp32.

Two passes over the logits, in their own dtype: one finds each token's sums, the other writes the gradient
over the logits. On CUDA they are Triton kernels. The plain form takes a few tokens at a time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.kernels.choice import Kernels

CHUNK = 2**22  # logits that the plain form holds in fp32 at a time


class Statistics(NamedTuple):
    """Per-token partial softmax statistics over this rank's vocabulary shard, fp32 [T].

    largest_T: the largest logit. sum_T: the sum of exp(logit - largest). label_logit_T: the label's logit, 0
    if the label is not among this rank's logits. total_T: the sum of the logits.
    """

    largest_T: Tensor
    sum_T: Tensor
    label_logit_T: Tensor
    total_T: Tensor


class Sums(NamedTuple):
    """Each token's sums over the whole vocabulary, fp32 [T].

    largest_T: the largest logit. scale_T: 1 / the sum of exp(logit - largest).
    """

    largest_T: Tensor
    scale_T: Tensor


class Target(NamedTuple):
    """What the loss compares with the probabilities: (1, 0) for cross entropy.

    of_label: the share of the label beyond `of_all`. of_all: the share of every entry.
    """

    of_label: float
    of_all: float


def plain_statistics(logits_TV: Tensor, label_T: Tensor) -> Statistics:
    """Compute the statistics by PyTorch's operators. label_T: int64, each label's column if it is here."""
    found = _empty_statistics(logits_TV)
    for tokens in _chunks(logits_TV):
        logits, label = logits_TV[tokens].float(), label_T[tokens, None]
        here = (label >= 0) & (label < logits.shape[1])
        label_logit = logits.gather(1, label.clamp(0, logits.shape[1] - 1)).masked_fill(~here, 0)
        found.label_logit_T[tokens] = label_logit[:, 0]
        found.total_T[tokens] = logits.sum(1)
        largest = logits.amax(1, keepdim=True)
        found.largest_T[tokens] = largest[:, 0]
        found.sum_T[tokens] = logits.sub(largest).exp_().sum(1)
    return found


def statistics(logits_TV: Tensor, label_T: Tensor, kernels: Kernels) -> Statistics:
    """Return the statistics of contiguous logits. label_T: int64, each label's column if it is here."""
    chosen = kernels.triton_for(logits_TV)
    if chosen is None:
        return plain_statistics(logits_TV, label_T)
    found = _empty_statistics(logits_TV)
    chosen.cross_entropy(logits_TV, label_T, len(logits_TV), logits_TV.shape[1], *found)
    return found


def write_gradient(
    logits_TV: Tensor, label_T: Tensor, sums: Sums, sent_T: Tensor, target: Target, kernels: Kernels
) -> Tensor:
    """Write sent * (exp(logit - largest) * scale - of_label * [is the label] - of_all) over the logits.

    Return them. sent_T: fp32.
    """
    chosen = kernels.triton_for(logits_TV)
    if chosen is None:
        return plain_write_gradient(logits_TV, label_T, sums, sent_T, target)
    arguments = (logits_TV, label_T, *sums, sent_T, len(logits_TV), logits_TV.shape[1], *target)
    chosen.cross_entropy_backward(*arguments)
    return logits_TV


def plain_write_gradient(
    logits_TV: Tensor, label_T: Tensor, sums: Sums, sent_T: Tensor, target: Target
) -> Tensor:
    """Compute `write_gradient` by PyTorch's operators."""
    for tokens in _chunks(logits_TV):
        label = label_T[tokens, None]
        here = (label >= 0) & (label < logits_TV.shape[1])
        change = logits_TV[tokens].float().sub_(sums.largest_T[tokens, None]).exp_()
        change.mul_(sums.scale_T[tokens, None]).sub_(target.of_all)
        of_label = torch.where(here, -target.of_label, 0.0).to(change.dtype)
        change.scatter_add_(1, label.clamp(0, logits_TV.shape[1] - 1), of_label)
        logits_TV[tokens] = change.mul_(sent_T[tokens, None]).to(logits_TV.dtype)
    return logits_TV


def _empty_statistics(logits_TV: Tensor) -> Statistics:
    return Statistics(*(logits_TV.new_empty(len(logits_TV), dtype=torch.float32) for _ in range(4)))


def _chunks(logits_TV: Tensor) -> list[slice]:
    size = max(1, CHUNK // max(1, logits_TV.shape[1]))
    return [slice(first, first + size) for first in range(0, len(logits_TV), size)]
