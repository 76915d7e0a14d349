"""`entropy_prune`: within each group, the improbable experts go until little doubt is left."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import masked
from megamoe.moe.compatibility import experts_wanted
from megamoe.moe.masks.expert_groups import by_group, check_groups
from megamoe.moe.part import Candidates, Example, Mask, ScoreFunction, StepContext
from megamoe.moe.routing import Scored
from megamoe.moe.ways_out import provides
from megamoe.registry import register

HEAD = 8  # an eighth of each group is enough for most tokens: only for the others all is sorted


@register("mask", "entropy_prune")
class EntropyPrune(Mask):
    """For each token and group, the largest set of most probable experts whose entropy is at most the bound.

    A group's experts are sorted by gating value, that is by score for a score function that is monotone; with
    q the values of the first m, renormalised to sum 1, H_m = -sum q ln q grows with m, and the first m
    experts of the largest m with H_m <= bound are kept. One always is: H_1 = 0. Experts that earlier masks
    took away count as absent. After `group_limit` with as many groups it prunes within the groups kept. A
    token with fewer experts left than the selector's k goes to those alone: with weights that sum to 1, each
    then counts for more.

    Source: Dubois 2025, lecture slides on mixture of experts, DeepSeek's hierarchy: "cluster-level pruning:
    within each pool, a secondary gating mechanism prunes experts based on entropy constraints".

    Caveats: the slides give no formula, this is a reading; the second gate is the first one's
    values, renormalised within the group, without the score function's bias; no paper of DeepSeek's describes
    the mechanism.
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
    def provides(cls, options: Config) -> set[str]:
        """What it goes by."""
        return {"by_probs"}

    @classmethod
    def num_candidates(cls, options: Config, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """At least one of every group, and no more where the bound is 0."""
        groups, size = options.num_groups, num_experts // options.num_groups
        return Candidates(num_experts, groups, (groups, groups), (1, 1 if options.bound == 0 else size))

    @classmethod
    def examples(cls, num_experts: int, num_choices: int) -> list[Example]:
        """Several groups."""
        return [Example({"num_groups": min(8, num_experts // 4)})]

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """Groups of one size, a bound that a group can exceed, and weights that the router can change."""
        check_groups(options.num_groups, moe)
        size = moe.num_experts // options.num_groups
        if options.bound >= math.log(size):
            raise ValueError(
                f"bound is {options.bound}, but the entropy over a group of {size} experts is at most "
                f"ln {size} = {math.log(size):.3f}; choose a lower bound or larger groups"
            )
        normalised = provides("normalised", moe.router.selector)
        wanted = max(experts_wanted(moe), 2)  # a single one, normalised, has weight 1 and no gradient
        if options.bound == 0 and normalised and options.num_groups < wanted:
            raise ValueError(
                f"bound 0 leaves {options.num_groups} experts, one of each group, of the {wanted} whose "
                "weights the selector makes sum to 1; set bound above 0, more groups, or weights: raw"
            )

    def forward(self, scored: Scored, context: StepContext) -> Tensor:
        """bool [T, E]."""
        order_TE, score_function = (
            scored.within_tokens_TE(scored.affinities_TE),
            scored.monotone_score_function,
        )
        if scored.candidates_TE is not None:
            order_TE = masked(order_TE, scored.candidates_TE, float("-inf"), self.dims.kernels)
        order_RL = by_group(order_TE, self.config.num_groups).flatten(0, 1)
        # Few experts are kept as a rule. A GPU sorts all as fast as it would tell who needs it.
        depth = -(-order_RL.shape[1] // HEAD) if order_RL.device.type == "cpu" else order_RL.shape[1]
        allowed_RL, count_R = self._kept(order_RL, depth, score_function)
        if depth < order_RL.shape[1]:
            row_S = (count_R == depth).nonzero().squeeze(1)
            allowed_RL[row_S], _ = self._kept(order_RL[row_S], order_RL.shape[1], score_function)
        return allowed_RL.view(order_TE.shape)

    def _kept(
        self, order_RL: Tensor, depth: int, score_function: ScoreFunction | None
    ) -> tuple[Tensor, Tensor]:
        """bool [R, L], and how many, int64 [R], if only the `depth` largest of a group are looked at.

        order_RL: the scores of a monotone score function, or without one the gating values; -inf for those
        absent.
        """
        best_RK, place_RK = _largest(order_RL, depth)
        values_RK = _over_largest(best_RK, score_function)
        sum_RK = values_RK.cumsum(-1).clamp_min(torch.finfo(values_RK.dtype).tiny)
        entropy_RK = sum_RK.log() - torch.xlogy(values_RK, values_RK).cumsum(-1) / sum_RK
        kept_RK = entropy_RK <= self.config.bound
        allowed_RL = torch.zeros_like(order_RL, dtype=torch.bool).scatter_(-1, place_RK, kept_RK)
        return allowed_RL, kept_RK.sum(dim=-1)


def _over_largest(best_RK: Tensor, score_function: ScoreFunction | None) -> Tensor:
    """The gating values over the first, the group's largest, of what `_kept` sorted; 0 for those absent.

    So a group far from probable is judged like any other, and H_1 is 0 exactly.
    """
    limits = torch.finfo(best_RK.dtype)
    if score_function is None:
        return best_RK.clamp_min(0.0) / best_RK[:, :1].clamp_min(limits.tiny)
    log_RK = score_function.log_values(best_RK)
    return (log_RK - log_RK[:, :1].clamp_min(limits.min)).exp()


def _largest(values_RL: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The `depth` largest of each row, in order, and where they stand."""
    if depth == values_RL.shape[1]:
        return values_RL.sort(dim=-1, descending=True, stable=True)
    return values_RL.topk(depth, dim=-1)
