"""Measures of balance: f and s / sum(s) of the losses sum_i f_i P_i, and the coefficient of variation."""

import torch
from torch import Tensor

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


def squared_cv(value_E: Tensor) -> Tensor:
    """Return the squared coefficient of variation (population variance) of values >= 0; 0 for zeros."""
    mean = value_E.mean()
    return (value_E - mean).square().mean() / mean.square().clamp_min(torch.finfo(value_E.dtype).tiny)
