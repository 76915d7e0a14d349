"""The probability to be chosen if the own noise is drawn again (Shazeer et al. 2017, eq. 8 and 9)."""

import math
from typing import Any

import torch
from torch import Tensor

SMALLEST_STD = 1e-6  # a softplus may underflow to 0, and 0 / 0 is NaN
SURE = 1e4  # standard deviations; beyond them the probability rounds to 0 or 1 and has no gradient


def choice_probability(level: list[Tensor], k: int) -> Tensor:
    """Returns, for each of the n in the last dimension, the probability to be among the k largest scores.

    Its own noise is drawn again; the scores of the others stay as they are. level: float [..., n], the scores
    without noise, with noise, and the noise's standard deviation, taken as at least 1e-6. A score of -inf is
    never chosen, and its probability is undefined. All results are 1 if k >= n.
    """
    clean, scores, std = level
    if k >= scores.shape[-1]:
        return torch.ones_like(scores)
    probability: Tensor = _ChoiceProbability.apply(clean, scores, std, k)
    return probability


class _ChoiceProbability(torch.autograd.Function):
    """Phi((clean_i - kth_excluding(scores, k, i)) / std_i), for which autograd would keep ten temporaries.

    The k-th largest of the others is the k-th largest of all; for the k chosen it is the (k+1)-th.
    """

    @staticmethod
    def forward(ctx: Any, clean: Tensor, scores: Tensor, std: Tensor, k: int) -> Tensor:
        best = scores.topk(k, dim=-1)
        # Not topk(k + 1): on the CPU it is three times as slow for n < 64 k.
        rest = scores.scatter(-1, best.indices, -math.inf).max(dim=-1, keepdim=True)
        std = std.clamp_min(SMALLEST_STD)
        margin = clean - best.values[..., -1:]
        margin.scatter_(-1, best.indices, clean.gather(-1, best.indices) - rest.values)
        z = margin.div_(std).clamp_(-SURE, SURE)
        ctx.save_for_backward(z, std, best.indices, rest.indices)
        return torch.special.ndtr(z)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        z, std, best, rest = ctx.saved_tensors
        # The gradient of the margin clean - kth; in place, since new memory costs more than the arithmetic.
        slope = z.square().mul_(-0.5).exp_().mul_(gradients[0]).div_(std).mul_(1 / math.sqrt(2 * math.pi))
        of_best = slope.gather(-1, best).sum(dim=-1, keepdim=True)
        of_others = slope.scatter(-1, best, 0.0).sum(dim=-1, keepdim=True)
        of_scores = torch.zeros_like(z).scatter_(-1, best[..., -1:], -of_others)
        of_scores.scatter_add_(-1, rest, -of_best)
        return slope, of_scores, z.mul(slope).neg_().mul_(std > SMALLEST_STD), None
