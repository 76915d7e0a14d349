"""Means within each sequence of a micro batch, for the losses that DeepSeek-V2 defines so."""

from torch import Tensor

from megamoe.moe.losses.squared_cv import shares
from megamoe.moe.masks.expert_groups import by_group
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing


def mean_over_sequences(values_TG: Tensor, context: StepContext) -> Tensor:
    """fp32 [T, G] -> [B, G]: the mean over each sequence's tokens; 0 without tokens."""
    length = values_TG.shape[0] // context.num_sequences
    values_SBG = values_TG.unflatten(0, (length, context.num_sequences))  # token s * B + b
    return values_SBG.sum(dim=0) / max(length, 1)


def group_probs(routing: Routing, num_groups: int, context: StepContext) -> Tensor:
    """fp32 [B, G]: P of each group: over its experts the sum, over the sequence the mean, of s_i / sum_j s_j.

    s: the score function's values over all experts, unrestricted; a softmax's sum to 1 already.
    """
    by_expert_BE = mean_over_sequences(shares(routing.affinities_TE), context)
    return by_group(by_expert_BE, num_groups).sum(dim=-1)
