"""Capacity: which of the wanted pairs survive.

`none` is dropless. `per_expert` gives every expert C = ceil(factor * k * T / E) places, and a pair
that finds none is dropped: its token passes through the residual alone (Lepikhin et al. 2021; Fedus
et al. 2021, eq. 3). T is the micro batch of one data-parallel rank, so that a drop never depends on
how the experts are spread over ranks.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from megamoe.moe.part import Part
from megamoe.moe.routing import Pairs
from megamoe.registry import register


@register("capacity", "none")
class Dropless(Part):
    """Every pair survives."""

    def forward(self, pairs: Pairs, num_tokens: int, num_choices: int) -> None:
        """None: no pair is dropped."""


@register("capacity", "per_expert")
class PerExpertCapacity(Part):
    """At most C pairs an expert, the best by priority.

    position: the first tokens of the micro batch. probability: the largest weights (Megatron's and
    DeepSpeed's `probs`); ties go to the earlier pair.
    """

    @dataclass
    class Config:
        """factor: gamma. eval_factor: in evaluation; default: the same. min_capacity: C's floor."""

        factor: float = 1.25
        eval_factor: float | None = None
        min_capacity: int = 4
        priority: Literal["position", "probability"] = "position"

        def __post_init__(self) -> None:
            if not self.factor > 0 or not (self.eval_factor is None or self.eval_factor > 0):
                raise ValueError("factor and eval_factor must be positive; for no limit use capacity: none")
            if self.min_capacity < 0:
                raise ValueError("min_capacity must be at least 0")

    def places(self, num_tokens: int, num_choices: int) -> int:
        """C, the places of each expert."""
        factor = self.config.factor
        if not self.training and self.config.eval_factor is not None:
            factor = self.config.eval_factor
        exact = Fraction(str(factor))  # as written: in floats 1.1 * 2 * 50 / 10 exceeds 11
        wanted = math.ceil(exact * num_choices * num_tokens / self.dims.num_experts)
        return max(wanted, self.config.min_capacity)

    def forward(self, pairs: Pairs, num_tokens: int, num_choices: int) -> Tensor:
        """bool [N]: which pairs keep their place."""
        if self.config.priority == "position":
            by_priority_N = torch.argsort(pairs.token_N, stable=True)
        else:
            by_priority_N = torch.argsort(pairs.weight_N.detach(), descending=True, stable=True)
        place_N = _place_in_expert(pairs.expert_N, by_priority_N, self.dims.num_experts)
        return place_N < self.places(num_tokens, num_choices)


def _place_in_expert(expert_N: Tensor, by_priority_N: Tensor, num_experts: int) -> Tensor:
    """int64 [N]: how many pairs of the same expert come before each pair in the order of priority."""
    by_expert_N = by_priority_N[torch.argsort(expert_N[by_priority_N], stable=True)]
    counts_E = torch.bincount(expert_N, minlength=num_experts)
    start_E = counts_E.cumsum(0) - counts_E
    place_N = torch.empty_like(expert_N)
    rank_N = torch.arange(expert_N.numel(), device=expert_N.device)
    place_N[by_expert_N] = rank_N - start_E[expert_N[by_expert_N]]
    return place_N
