"""`hierarchical_top_k`: the best groups of experts, then the best experts of each.

Further shape suffixes: G groups, A groups chosen, S experts of a group, C chosen of those, K = A * C.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import largest
from megamoe.moe.part import Selector, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.validation import size_of_extra
from megamoe.registry import register


@register("selector", "hierarchical_top_k")
class HierarchicalTopK(Selector):
    """The `groups` groups with the largest primary scores, and in each the k experts with the largest scores.

    The weight is G_primary(x)_i G_i(x)_j. Each factor is a softmax over the kept scores of its level, so a
    token's weights sum to 1. Choices are ordered by weight. A mask removes experts from their groups before
    the softmax, and a group without candidates is chosen only if no other is left.

    Source: Shazeer et al. 2017 (SGMoE), appendix B, eq. 12, with eq. 3 at each level; 2 and 2 are from its
    appendix C.1.
    """

    experts_alike = True

    @dataclass
    class Config:
        """groups: the number of groups that a token chooses. k: experts chosen in each of them."""

        groups: int = 2
        k: int = 2

        def __post_init__(self) -> None:
            for name, value in (("groups", self.groups), ("k", self.k)):
                if value < 2:
                    raise ValueError(
                        f"{name} must be at least 2, found {value}: over one choice the softmax is always 1, "
                        "and that level's score function would get no gradient; or set selector: top_k"
                    )

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"chosen_groups_TA", "normalised", "fixed_count"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        why = "by which groups are chosen, and then their experts"
        return {"group_scores_TG": why, "inner_scores_TE": why}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"bias": "which does not reach a choice made by levels"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        num_groups = size_of_extra(moe, "group_scores_TG")
        size = moe.num_experts // num_groups
        if options.groups > num_groups or options.k > size:
            raise ValueError(
                f"groups is {options.groups} and k {options.k}, but the scorer makes {num_groups} groups of "
                f"{size} experts; choose groups <= {num_groups} and k <= {size}, or other scorer.groups"
            )

    @property
    def num_choices(self) -> int:
        """The k that the capacity counts with: choices in all groups together."""
        return int(self.config.groups * self.config.k)

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return T * groups * k pairs, fewer if a token has fewer candidates.

        Adds the extra chosen_groups_TA, int64 [T, groups], for the losses.
        """
        group_TG = scored.extras["group_scores_TG"]
        inner_TGS = scored.extras["inner_scores_TE"].unflatten(1, (group_TG.shape[1], -1))
        if scored.candidates_TE is not None:
            # Not -inf: the softmax of a token without candidates would be NaN.
            lowest = torch.finfo(torch.float32).min
            candidates_TGS = scored.candidates_TE.unflatten(1, (group_TG.shape[1], -1))
            inner_TGS = inner_TGS.masked_fill(~candidates_TGS, lowest)
            group_TG = group_TG.masked_fill(~candidates_TGS.any(dim=2), lowest)
        group_TA = largest(group_TG, self.config.groups)
        kept_TA = group_TG.gather(1, group_TA)
        scored.extras["chosen_groups_TA"] = group_TA
        expert_TK, weight_TK = self._choices(kept_TA, group_TA, inner_TGS)
        valid_TK = None if scored.candidates_TE is None else scored.candidates_TE.gather(1, expert_TK)
        return Pairs.of_choices(expert_TK, weight_TK, valid_TK)

    def _choices(self, kept_TA: Tensor, group_TA: Tensor, inner_TGS: Tensor) -> tuple[Tensor, Tensor]:
        """Return experts and weights, [T, groups * k], in order of choice."""
        size = inner_TGS.shape[2]
        inner_TAS = inner_TGS.gather(1, group_TA[:, :, None].expand(-1, -1, size))
        place_TAC = largest(inner_TAS, self.config.k)
        kept_TAC = inner_TAS.gather(2, place_TAC)
        weight_TK = (kept_TA.softmax(dim=1)[:, :, None] * kept_TAC.softmax(dim=2)).flatten(1)
        expert_TK = (group_TA[:, :, None] * size + place_TAC).flatten(1)
        # Sorted by logarithms: products may underflow to 0.
        log_TAC = kept_TA.detach().log_softmax(dim=1)[:, :, None] + kept_TAC.detach().log_softmax(dim=2)
        order_TK = log_TAC.flatten(1).argsort(dim=1, descending=True, stable=True)
        return expert_TK.gather(1, order_TK), weight_TK.gather(1, order_TK)
