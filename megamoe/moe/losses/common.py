"""What losses share: f and s of balance losses, squared variation, means per sequence, probabilities of a
choice.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.autograd import Function
from megamoe.moe.masks.expert_groups import by_group
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing, count


def wanted_counts(routing: Routing, first_choice: bool = False) -> Tensor:
    """Return the wanted pairs of each expert, int64 [E]; `first_choice`: only each token's first choice."""
    if not first_choice:
        return routing.wanted_counts_E()
    wanted = routing.wanted
    return count(wanted.expert_N, routing.num_experts, wanted.choice_N == 0)


def fractions(counts: Tensor) -> Tensor:
    """Return counts divided by their sum over the experts, int64 [..., E] -> fp32; all 0 if the sum is 0."""
    return counts.to(torch.float32) / counts.sum(dim=-1, keepdim=True).clamp_min(1)


def shares(values_TE: Tensor) -> Tensor:
    """Return each token's values divided by their sum, fp32 [T, E] (DeepSeek-V3 eq. 19)."""
    total_T1 = values_TE.sum(dim=-1, keepdim=True)
    return values_TE / total_T1.clamp_min(torch.finfo(total_T1.dtype).tiny)


def probs_shares(routing: Routing, score_function: frozenset[str]) -> Tensor:
    """Return p that sum to 1 for each token, fp32 [T, E]; else a balance loss could fall by shrinking them.

    score_function: the capabilities of the router's score function.
    """
    over_all = (
        routing.score_function is not None
        and routing.score_function.over_all
        and routing.candidates_TE is not None
    )
    sums_to_1 = "softmax_of_scores" in score_function and not over_all
    return routing.probs_TE if sums_to_1 else shares(routing.probs_TE)


def squared_cv(value_E: Tensor) -> Tensor:
    """Return the squared coefficient of variation (population variance) of values >= 0; 0 for zeros."""
    mean = value_E.mean()
    return (value_E - mean).square().mean() / mean.square().clamp_min(torch.finfo(value_E.dtype).tiny)


def mean_over_sequences(values_TG: Tensor, context: StepContext) -> Tensor:
    """Return the mean over each sequence's tokens, fp32 [T, G] -> [B, G]; 0 if there are no tokens."""
    if context.batch.sequence_T is not None:  # of different lengths
        sequence_T = context.sequence(len(values_TG), values_TG.device)
        sums_BG = values_TG.new_zeros(context.num_sequences, values_TG.shape[1])
        sums_BG = sums_BG.index_add(0, sequence_T, values_TG)
        return sums_BG / count(sequence_T, context.num_sequences).clamp(min=1)[:, None]
    length = values_TG.shape[0] // context.num_sequences
    values_SBG = values_TG.unflatten(0, (length, context.num_sequences))  # token s * B + b
    return values_SBG.sum(dim=0) / max(length, 1)


def group_probs(routing: Routing, num_groups: int, context: StepContext) -> Tensor:
    """Return P of each group, fp32 [B, G]: s_i / sum_j s_j, summed over its experts, averaged over the
    sequence.

    s: the score function's values over all experts, before any mask; a softmax's already sum to 1.
    """
    by_expert_BE = mean_over_sequences(shares(routing.affinities_TE), context)
    return by_group(by_expert_BE, num_groups).sum(dim=-1)


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
    return _ChoiceProbability.apply(clean, scores, std, k)


class _ChoiceProbability(Function):
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
