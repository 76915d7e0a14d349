"""Means over each sequence of a micro batch, for the losses that DeepSeek-V2 defines per sequence."""

from torch import Tensor

from megamoe.moe.losses.squared_cv import shares
from megamoe.moe.masks.expert_groups import by_group
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing, count


def mean_over_sequences(values_TG: Tensor, context: StepContext) -> Tensor:
    """Return the mean over each sequence's tokens, fp32 [T, G] -> [B, G]; 0 if there are no tokens."""
    if context.sequence_T is not None:  # of different lengths
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
