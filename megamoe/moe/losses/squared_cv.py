"""How balance is measured: f and s / sum(s) of the losses sum_i f_i P_i, and the coefficient of variation."""

import torch
from torch import Tensor

from megamoe.moe.routing import Routing, count


def wanted_counts(routing: Routing, first_choice: bool = False) -> Tensor:
    """int64 [E]: the wanted pairs of each expert; `first_choice`: only each token's first."""
    wanted = routing.wanted
    return count(wanted.expert_N, routing.num_experts, wanted.choice_N == 0 if first_choice else None)


def fractions(counts: Tensor) -> Tensor:
    """int64 [..., E] -> fp32 [..., E] that sum to 1 over the experts; all 0 where nothing was counted."""
    return counts.to(torch.float32) / counts.sum(dim=-1, keepdim=True).clamp_min(1)


def shares(values_TE: Tensor) -> Tensor:
    """fp32 [T, E] -> [T, E]: each token's values over their sum (DeepSeek-V3 eq. 19)."""
    total_T1 = values_TE.sum(dim=-1, keepdim=True)
    return values_TE / total_T1.clamp_min(torch.finfo(total_T1.dtype).tiny)


def squared_cv(value_E: Tensor) -> Tensor:
    """Squared coefficient of variation of non-negative values, variance of the population; 0 of zeros."""
    mean = value_E.mean()
    return (value_E - mean).square().mean() / mean.square().clamp_min(torch.finfo(value_E.dtype).tiny)
