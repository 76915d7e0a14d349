"""Cross entropy over a vocabulary, without a tensor of [tokens, words] in fp32.

Two passes over the logits, in their own dtype: one finds each token's sums, the other writes the gradient
over the logits. On CUDA they are Triton kernels. The plain form takes a few tokens at a time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**22  # logits that the plain form holds in fp32 at a time


class Statistics(NamedTuple):
    """Of each token over one rank's words, fp32 [T].

    largest_T: the largest logit. sum_T: the sum of exp(logit - largest). label_logit_T: the label's logit, 0
    if the label is not among these words. total_T: the sum of the logits.
    """

    largest_T: Tensor
    sum_T: Tensor
    label_logit_T: Tensor
    total_T: Tensor


def plain_statistics(logits_TV: Tensor, label_T: Tensor) -> Statistics:
    """Compute the statistics by PyTorch's operators. label_T: int64, each label's column if it is here."""
    found = Statistics(*(logits_TV.new_empty(len(logits_TV), dtype=torch.float32) for _ in range(4)))
    for tokens in _chunks(logits_TV):
        logits, label = logits_TV[tokens].float(), label_T[tokens, None]
        here = (label >= 0) & (label < logits.shape[1])
        label_logit = logits.gather(1, label.clamp(0, logits.shape[1] - 1)).masked_fill(~here, 0)
        found.label_logit_T[tokens] = label_logit[:, 0]
        found.total_T[tokens] = logits.sum(1)
        largest = logits.amax(1, keepdim=True)
        found.largest_T[tokens] = largest[:, 0]
        found.sum_T[tokens] = logits.sub_(largest).exp_().sum(1)
    return found


def plain_gradient(
    logits_TV: Tensor, label_T: Tensor, log_sum_T: Tensor, sent_T: Tensor, of_label: float, of_all: float
) -> Tensor:
    """Write sent * (exp(logit - log_sum) - of_label * [is the label] - of_all) over the logits; return them.

    log_sum_T, sent_T: fp32. The two numbers are (1, 0) for the gradient of cross entropy.
    """
    for tokens in _chunks(logits_TV):
        label = label_T[tokens, None]
        here = (label >= 0) & (label < logits_TV.shape[1])
        change = logits_TV[tokens].float().sub(log_sum_T[tokens, None]).exp_()
        change.sub_(of_all) if of_all else None
        of_labels = torch.where(here, -of_label, 0.0).to(change.dtype)
        change.scatter_add_(1, label.clamp(0, logits_TV.shape[1] - 1), of_labels)
        logits_TV[tokens] = change.mul_(sent_T[tokens, None]).to(logits_TV.dtype)
    return logits_TV


def _chunks(logits_TV: Tensor) -> list[slice]:
    size = max(1, CHUNK // max(1, logits_TV.shape[1]))
    return [slice(first, first + size) for first in range(0, len(logits_TV), size)]
