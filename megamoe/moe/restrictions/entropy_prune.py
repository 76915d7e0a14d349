"""`entropy_prune`: within each group, the improbable experts go until little doubt is left."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import Restriction, StepContext
from megamoe.moe.restrictions.groups import by_group, check_groups
from megamoe.moe.routing import Scored
from megamoe.registry import register


@register("restriction", "entropy_prune")
class EntropyPrune(Restriction):
    """For each token and group, the largest set of most probable experts whose entropy is at most the bound.

    A group's experts are sorted by gate value; with q the values of the first m, renormalised to sum 1,
    H_m = -sum q ln q grows with m, and the first m experts of the largest m with H_m <= bound are kept. One
    always is: H_1 = 0. Experts that earlier restrictions took away count as absent. After `group_limit`
    with as many groups it prunes within the groups kept.

    Source: Dubois 2025, lecture slides on mixture of experts, DeepSeek's hierarchy: "cluster-level pruning:
    within each pool, a secondary gating mechanism prunes experts based on entropy constraints".

    Caveats: the slides give no formula, this is a reading; the second gate is the first one's values,
    renormalised within the group, without the gate's bias; no paper of DeepSeek's describes the mechanism.
    """

    @dataclass
    class Config:
        """num_groups: pools of E/num_groups neighbours; 1: all in one. bound: on the entropy, nats."""

        num_groups: int = 1
        bound: float = 1.0

        def __post_init__(self) -> None:
            if self.num_groups < 1:
                raise ValueError("num_groups must be at least 1")
            if not self.bound >= 0:
                raise ValueError("bound must be at least 0")

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """Groups of one size, and a bound that a group can exceed."""
        check_groups(options.num_groups, moe)
        size = moe.num_experts // options.num_groups
        if options.bound >= math.log(size):
            raise ValueError(
                f"bound is {options.bound}, but the entropy over a group of {size} experts is at most "
                f"ln {size} = {math.log(size):.3f}; choose a lower bound or larger groups"
            )

    def forward(self, scored: Scored, context: StepContext) -> Tensor:
        """bool [T, E]."""
        values_TE = scored.affinities_TE.detach()
        if scored.candidates_TE is not None:
            values_TE = values_TE.masked_fill(~scored.candidates_TE, 0.0)
        values_TGL = by_group(values_TE, self.config.num_groups)
        values_TGL, order_TGL = values_TGL.sort(dim=-1, descending=True, stable=True)
        # Relative to the largest: a group far from probable is judged like any other, and H_1 is 0 exactly.
        tiny = torch.finfo(values_TGL.dtype).tiny
        values_TGL = values_TGL / values_TGL[..., :1].clamp_min(tiny)
        sum_TGL = values_TGL.cumsum(-1).clamp_min(tiny)
        entropy_TGL = sum_TGL.log() - torch.xlogy(values_TGL, values_TGL).cumsum(-1) / sum_TGL
        allowed_TGL = torch.empty_like(order_TGL, dtype=torch.bool)
        allowed_TGL.scatter_(-1, order_TGL, entropy_TGL <= self.config.bound)
        return allowed_TGL.flatten(1)
