"""`expert_dropout`: some experts cannot be chosen in a step."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.masks.expert_groups import check_clusters
from megamoe.moe.part import Candidates, Mask, StepContext
from megamoe.moe.routing import Scored
from megamoe.moe.validation import candidates_of, experts_wanted
from megamoe.registry import get_part, register


@register("mask", "expert_dropout")
class ExpertDropout(Mask):
    """In each training step, exactly round(rate * L) random experts of every cluster of L are removed.

    The experts form E/L clusters of L neighbours. The score function is then computed over the E (1 - rate)
    remaining experts. Evaluation uses all experts. With level `global` the same total number is drawn from
    all experts, so a cluster may lose all of its own (MoEC's ablation, which is worse). The draw depends on
    (seed, step, layer) alone: one mask for all tokens, ranks and micro batches of a step.

    Source: Xie et al. 2022 (MoEC), section "Cluster-level expert dropout" and table 3.

    Caveats: the paper gives no rounding; ours rounds halves to even. It does not say how often the experts
    are drawn; ours are drawn in each step.
    """

    experts_alike = True

    step_wide = True
    random = True

    @dataclass
    class Config:
        """level: drop within every cluster, or among all experts. rate: gamma, the share dropped.
        cluster_size: L.
        """

        level: Literal["cluster", "global"] = "cluster"
        rate: float = 0.5
        cluster_size: int = 8

        def __post_init__(self) -> None:
            if self.cluster_size < 1:
                raise ValueError("cluster_size must be at least 1")
            if not 0 <= self.rate < 1:
                raise ValueError("rate must be at least 0 and under 1")
            dropped = self.num_dropped
            if dropped == self.cluster_size or (dropped == 0 and self.rate > 0):
                raise ValueError(
                    f"rate {self.rate} drops {dropped} of a cluster of {self.cluster_size} experts; choose "
                    "one that rounds to at least 1 and leaves at least 1"
                )

        @property
        def num_dropped(self) -> int:
            """The number of experts dropped in each cluster; with level `global`, on average."""
            # The rate as the decimal that was written: a float may miss a half.
            return round(Fraction(str(self.rate)) * self.cluster_size)

        def num_left(self, num_experts: int) -> int:
            """Return the number of experts that a training step leaves."""
            return num_experts - num_experts // self.cluster_size * self.num_dropped

    @classmethod
    def num_candidates(cls, options: Config, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """The same number in every cluster; with level `global`, of all experts."""
        if options.level == "global":
            left = options.num_left(num_experts)
            return Candidates(num_experts, each=(left, left))
        clusters, left = num_experts // options.cluster_size, options.num_left(options.cluster_size)
        return Candidates(num_experts, clusters, (clusters, clusters), (left, left))

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        check_clusters(options.cluster_size, moe, expert_parallel if options.level == "cluster" else 1)
        left, wanted = options.num_left(moe.num_experts), experts_wanted(moe)
        if left < wanted:
            raise ValueError(
                f"rate {options.rate} leaves {left} of {moe.num_experts} experts, but the selector's k is "
                f"{wanted}; lower the rate or k"
            )
        for choice in moe.router.masks:
            left_by = candidates_of(choice, moe.num_experts, expert_parallel)
            if get_part(choice.kind, choice.name).step_wide and left_by.kept[0] < left_by.groups:
                _refuse_empty_ranks(options, choice.name, left_by.groups, moe)

    def forward(self, scored: Scored, context: StepContext) -> Tensor | None:
        """Return the candidates, bool [T, E], with equal rows; None if nothing is dropped."""
        if not self.training or self.config.num_dropped == 0:
            return None
        return self._draw_E(context, scored.scores_TE.device).expand_as(scored.scores_TE)

    def closed_E(self, context: StepContext) -> Tensor | None:
        """Return the experts dropped in this step, bool [E]."""
        if not self.training or self.config.num_dropped == 0:
            return None
        return ~self._draw_E(context, torch.device("cpu"))

    def _draw_E(self, context: StepContext, device: torch.device) -> Tensor:
        num_clusters = self.dims.num_experts // self.config.cluster_size
        rows, dropped = num_clusters, self.config.num_dropped
        if self.config.level == "global":
            rows, dropped = 1, num_clusters * self.config.num_dropped
        columns = self.dims.num_experts // rows
        draw_key = context.draw_key(self.dims.layer, "expert dropout")
        unit_CL = rng.uniform(draw_key, torch.arange(rows, device=device), columns, kernels=self.dims.kernels)
        order_CL = unit_CL.argsort(dim=1, stable=True)
        allowed_CL = torch.ones_like(unit_CL, dtype=torch.bool).scatter_(1, order_CL[:, :dropped], False)
        return allowed_CL.reshape(-1)


def _refuse_empty_ranks(options: ExpertDropout.Config, other: str, ranks: int, moe: MoEConfig) -> None:
    """Raise ValueError if a rank could lose all experts while another mask keeps its tokens there."""
    if options.num_dropped == 0:
        return
    if options.level == "global":
        raise ValueError(
            f"level global may drop all experts of a rank, on which {other} keeps its tokens; set "
            "level: cluster, or leave one of the two out"
        )
    if moe.num_experts // ranks % options.cluster_size:
        raise ValueError(
            f"cluster_size is {options.cluster_size}, but {other} keeps tokens among the "
            f"{moe.num_experts / ranks:g} experts of one of {ranks} ranks, which might all be dropped; "
            "choose a cluster_size that divides them, or fewer ranks"
        )
