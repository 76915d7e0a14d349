"""`group_limit`: each token's experts lie in few groups, so that it travels to few devices or nodes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.masks.compatibility import experts_wanted, refuse_one_candidate
from megamoe.moe.masks.expert_groups import by_group, check_groups
from megamoe.moe.part import Mask, StepContext
from megamoe.moe.routing import Scored
from megamoe.registry import register


@register("mask", "group_limit")
class GroupLimit(Mask):
    """For each token, the `keep` groups with the highest scores remain.

    A group's score is made of its experts' gating values over all experts, with the score function's bias
    where it has one: `max`, the largest, or `sum`, over its `best` largest. An expert that an earlier mask
    took away counts in a sum as the token's least that is left, and a group without any other comes last.

    Source: DeepSeek-V2, section 2.2.2, device-limited routing (max, keep 3); DeepSeek-V3, section 2.1.2,
    node-limited routing (sum, 4 of 8).

    Caveats: V3's text sums the k / keep largest (and so does Megatron-Core), the default; V3's released code
    always sums two, which at its own k = 8, keep = 4 is the same. Where the selector's k varies by token,
    the default sums 1.
    """

    @dataclass
    class Config:
        """num_groups: devices or nodes, E/num_groups neighbours each. keep: M, groups a token may go to.

        score: how experts make a group's score. best: experts summed by `sum`; default: k / keep,
        rounded down, at least 1.
        """

        num_groups: int = 8
        keep: int = 3
        score: Literal["max", "sum"] = "max"
        best: int | None = None

        def __post_init__(self) -> None:
            if not 1 <= self.keep < self.num_groups:
                raise ValueError(
                    f"keep must be at least 1 and under num_groups {self.num_groups}, found {self.keep}"
                )
            if self.best is not None and self.score != "sum":
                raise ValueError("best is an option of score: sum; leave it out")
            if self.best is not None and self.best < 1:
                raise ValueError("best must be at least 1")

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """Groups of one size, large enough for what is asked of them."""
        check_groups(options.num_groups, moe)
        size = moe.num_experts // options.num_groups
        k = experts_wanted(moe)
        if options.keep * size < k:
            raise ValueError(
                f"keep {options.keep} leaves {options.keep * size} experts in groups of {size}, but the "
                f"selector's k is {k}; raise keep or lower k"
            )
        if options.best is not None and options.best > size:
            raise ValueError(f"best is {options.best}, but a group has {size} experts; choose best <= {size}")
        refuse_one_candidate(moe)

    def forward(self, scored: Scored, context: StepContext) -> Tensor:
        """bool [T, E]: `keep` groups a token."""
        ranking_TGL = by_group(scored.ranking_TE, self.config.num_groups)
        score_TG = ranking_TGL.amax(dim=-1)
        if self.config.score == "sum":
            best_TGB = ranking_TGL.topk(self._best, dim=-1).values
            if scored.candidates_TE is not None:
                best_TGB = _above_least(best_TGB, scored)
            score_TG = best_TGB.sum(dim=-1).masked_fill(score_TG == float("-inf"), float("-inf"))
        kept_TM = score_TG.topk(self.config.keep, dim=-1).indices
        allowed_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, kept_TM, True)
        return allowed_TG[:, :, None].expand_as(ranking_TGL).reshape(scored.scores_TE.shape)

    @property
    def _best(self) -> int:
        return int(self.config.best or max(self.dims.num_choices // self.config.keep, 1))


def _above_least(best_TGB: Tensor, scored: Scored) -> Tensor:
    """The values over the token's least finite one, none below 0; 0 for those absent, which never win so."""
    least_T = scored.ranking_TE.masked_fill(scored.ranking_TE == float("-inf"), float("inf")).amin(dim=-1)
    return (best_TGB - least_T[:, None, None]).masked_fill(best_TGB == float("-inf"), 0.0)
