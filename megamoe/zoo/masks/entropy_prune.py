"""`entropy_prune`: in each group, the least probable experts are removed until the entropy is low."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import largest
from megamoe.moe.capabilities import provides
from megamoe.moe.masks.expert_groups import by_group, check_groups
from megamoe.moe.part import Candidates, Mask, ScoreFunction, StepContext
from megamoe.moe.routing import Scored
from megamoe.moe.validation import experts_wanted
from megamoe.registry import register

HEAD = 8  # an eighth of each group is enough for most tokens; groups are sorted in full for the others only


@register("mask", "entropy_prune")
class EntropyPrune(Mask):
    """For each token and group, the largest set of most probable experts whose entropy is at most the bound.

    A group's experts are sorted by gating value, or by score if the score function is monotone. q are the
    values of the first m experts, normalised to sum 1. Their entropy H_m = -sum q ln q grows with m. The mask
    keeps the first m experts for the largest m with H_m <= bound; since H_1 = 0, it keeps at least one.
    Experts that earlier masks removed count as absent. After `group_limit` with the same number of groups it
    prunes within the groups kept. A token with fewer candidates than the selector's k gets fewer pairs; with
    weights that sum to 1, each of them then has more weight.

    Source: Dubois 2025, lecture slides on mixture of experts, DeepSeek's hierarchy: "cluster-level pruning:
    within each pool, a secondary gating mechanism prunes experts based on entropy constraints".

    Caveats: the slides give no formula; this is our reading. The second gate is the first gate's values,
    normalised within the group, without the score function's bias. No DeepSeek paper describes the mechanism.
    """

    @dataclass
    class Config:
        """num_groups: pools of E/num_groups neighbouring experts; 1: one pool. bound: on the entropy, in
        nats.
        """

        num_groups: int = 1
        bound: float = 1.0

        def __post_init__(self) -> None:
            if self.num_groups < 1:
                raise ValueError("num_groups must be at least 1")
            if not self.bound >= 0:
                raise ValueError("bound must be at least 0")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"by_probs"}

    @classmethod
    def num_candidates(cls, options: Config, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """At least one expert of every group, and no more if the bound is 0."""
        groups, size = options.num_groups, num_experts // options.num_groups
        return Candidates(num_experts, groups, (groups, groups), (1, 1 if options.bound == 0 else size))

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        check_groups(options.num_groups, moe)
        size = moe.num_experts // options.num_groups
        if options.bound >= math.log(size):
            raise ValueError(
                f"bound is {options.bound}, but the entropy over a group of {size} experts is at most "
                f"ln {size} = {math.log(size):.3f}; choose a lower bound or larger groups"
            )
        normalised = provides("normalised", moe.router.selector)
        wanted = max(experts_wanted(moe), 2)  # a single expert has the normalised weight 1 and no gradient
        if options.bound == 0 and normalised and options.num_groups < wanted:
            raise ValueError(
                f"bound 0 leaves {options.num_groups} experts, one of each group, of the {wanted} whose "
                "weights the selector makes sum to 1; set bound above 0, more groups, or weights: raw"
            )

    def forward(self, scored: Scored, context: StepContext) -> Tensor:
        """Return the candidates, bool [T, E]."""
        order_TE, score_function = (
            scored.within_tokens_TE(scored.affinities_TE),
            scored.monotone_score_function,
        )
        order_TE = scored.of_candidates_TE(order_TE, float("-inf"), self.dims.kernels)
        order_RL = by_group(order_TE, self.config.num_groups).flatten(0, 1)
        # Few experts are usually kept. On a GPU a full sort is as fast as finding the tokens that need one.
        depth = -(-order_RL.shape[1] // HEAD) if order_RL.device.type == "cpu" else order_RL.shape[1]
        allowed_RL, count_R = self._kept(order_RL, depth, score_function)
        if depth < order_RL.shape[1]:
            row_S = (count_R == depth).nonzero().squeeze(1)
            allowed_RL[row_S], _ = self._kept(order_RL[row_S], order_RL.shape[1], score_function)
        return allowed_RL.view(order_TE.shape)

    def _kept(
        self, order_RL: Tensor, depth: int, score_function: ScoreFunction | None
    ) -> tuple[Tensor, Tensor]:
        """Return the kept experts, bool [R, L], and their number, int64 [R], given the `depth` largest.

        order_RL: the scores of a monotone score function, otherwise the gating values; -inf for absent
        experts.
        """
        best_RK, place_RK = _largest(order_RL, depth)
        values_RK = _over_largest(best_RK, score_function)
        sum_RK = values_RK.cumsum(-1).clamp_min(torch.finfo(values_RK.dtype).tiny)
        entropy_RK = sum_RK.log() - torch.xlogy(values_RK, values_RK).cumsum(-1) / sum_RK
        kept_RK = entropy_RK <= self.config.bound
        allowed_RL = torch.zeros_like(order_RL, dtype=torch.bool).scatter_(-1, place_RK, kept_RK)
        return allowed_RL, kept_RK.sum(dim=-1)


def _over_largest(best_RK: Tensor, score_function: ScoreFunction | None) -> Tensor:
    """Return the gating values divided by the group's largest; 0 for absent experts.

    The result does not depend on how probable the group is, and H_1 is exactly 0.
    """
    limits = torch.finfo(best_RK.dtype)
    if score_function is None:
        return best_RK.clamp_min(0.0) / best_RK[:, :1].clamp_min(limits.tiny)
    log_RK = score_function.log_values(best_RK)
    return (log_RK - log_RK[:, :1].clamp_min(limits.min)).exp()


def _largest(values_RL: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the `depth` largest values of each row, in order, and their indices; of equal ones the first."""
    if depth == values_RL.shape[1]:
        return values_RL.sort(dim=-1, descending=True, stable=True)
    place_RK = largest(values_RL, depth)
    return values_RL.gather(-1, place_RK), place_RK
