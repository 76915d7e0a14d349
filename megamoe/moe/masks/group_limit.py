"""`group_limit`: each token's experts lie in few groups, so it is sent to few devices or nodes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import largest
from megamoe.moe.masks.expert_groups import by_group, check_groups
from megamoe.moe.part import Candidates, Mask, StepContext
from megamoe.moe.routing import Scored
from megamoe.moe.validation import experts_wanted
from megamoe.registry import register


@register("mask", "group_limit")
class GroupLimit(Mask):
    """For each token, the `keep` groups with the highest group scores remain.

    A group's score is computed from its experts' affinities plus the score function's bias: `max`, the
    largest, or `sum`, the sum of the `best` largest. With a monotone score function without bias, `max`
    compares the scores themselves, and `sum` computes p from them in fp64, so that values which fp32 rounds
    to 1 or 0 do not tie. An expert that an earlier mask removed counts in a sum as the token's smallest
    remaining value, and a group without candidates comes last.

    Source: DeepSeek-V2, section 2.2.2, device-limited routing (max, keep 3); DeepSeek-V3, section 2.1.2,
    node-limited routing (sum, 4 of 8).

    Caveats: DeepSeek-V2's weights come from a softmax over all experts, which the limit does not renormalise:
    set score_function: {name: softmax, over: all}, as the preset deepseek_v2 does. V3's text sums the k /
    keep largest (as does Megatron-Core), which is the default. V3's released code always sums two, which is
    the same at its k = 8, keep = 4. If the selector's k varies by token, the default sums 1; with
    `above` it is by `mean`, and at most a group's experts.
    """

    experts_alike = True

    @dataclass
    class Config:
        """num_groups: devices or nodes, with E/num_groups neighbouring experts each. keep: M, the groups that
        a token may go to. score: how a group's score is computed. best: the number of experts summed by
        `sum`; default: k / keep, rounded down, at least 1.
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
    def group_limit(cls, options: Config) -> tuple[int, int]:
        """See `Mask`."""
        return options.num_groups, options.keep

    @classmethod
    def num_candidates(cls, options: Config, num_experts: int, expert_parallel: int = 1) -> Candidates:
        size, kept = num_experts // options.num_groups, options.keep
        return Candidates(num_experts, options.num_groups, (kept, kept), (size, size))

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
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

    def forward(self, scored: Scored, context: StepContext) -> Tensor:
        """Return the candidates, bool [T, E]: `keep` groups for each token."""
        ranking_TGL = by_group(scored.ranking_TE, self.config.num_groups)
        if self.config.score == "sum" and self._best > 1:
            score_TG = _sums(ranking_TGL.topk(self._best, dim=-1).values, scored)
        else:
            score_TG = ranking_TGL.amax(dim=-1)
        kept_TM = largest(score_TG, self.config.keep)
        allowed_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, kept_TM, True)
        return allowed_TG[:, :, None].expand_as(ranking_TGL).reshape(scored.scores_TE.shape)

    @property
    def _best(self) -> int:
        size = self.dims.num_experts // self.config.num_groups
        return int(self.config.best or min(max(self.dims.num_choices // self.config.keep, 1), size))


def _sums(best_TGB: Tensor, scored: Scored) -> Tensor:
    """Return the sum over each group's best experts, [T, G]; -inf for a group without candidates.

    best_TGB: the largest ranking values of each group.
    """
    absent_TGB = best_TGB == float("-inf")
    value_TGB, least_T11 = best_TGB, None
    if scored.candidates_TE is not None:
        absent_TE = scored.ranking_TE == float("-inf")
        least_T11 = scored.ranking_TE.masked_fill(absent_TE, float("inf")).amin(dim=-1)[:, None, None]
    score_function = scored.monotone_score_function
    if scored.ranked_by_scores and score_function is not None:
        # p divided by the token's largest, in fp64: fp32 would round it to 1 or 0.
        log_TGB = score_function.log_values(best_TGB).double()
        top_T11 = log_TGB.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        value_TGB = (log_TGB - top_T11).exp()
        if least_T11 is not None:
            least_T11 = (score_function.log_values(least_T11).double() - top_T11).exp()
    if least_T11 is not None:  # minus the token's least, so that an absent expert (0) never wins
        value_TGB = (value_TGB - least_T11).masked_fill(absent_TGB, 0.0)
    return value_TGB.sum(dim=-1).masked_fill(absent_TGB.all(dim=-1), float("-inf"))
