"""`gating_dropout`: in some steps every token stays on its own rank, without an all-to-all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.part import Candidates, Mask, StepContext
from megamoe.moe.routing import Scored
from megamoe.registry import register


@register("mask", "gating_dropout")
class GatingDropout(Mask):
    """With probability `rate`, a training step's tokens may choose only the experts of their own rank.

    There is one draw per step, from (seed, step): the same on all ranks, in all micro batches and all layers.
    A rank's experts are E/ranks neighbours. A token's own rank is its micro batch's number modulo `ranks`,
    since ranks take micro batches in turn. So the result depends on `ranks` and not on the layout. If `ranks`
    is the real number of expert-parallel ranks, a dropped step has no all-to-all. In evaluation nothing is
    dropped.

    Source: Liu et al. 2022, Gating Dropout, section 3 ("Gate-Drop"; Gate-Expert-Drop, which skips the experts
    too, is not implemented).

    Caveats: in the paper a coordinator broadcasts the decision; ours needs no message. One decision for all
    layers is our reading. The score function, computed over a rank's experts, chooses among them. A rank with
    fewer experts than k gives its tokens fewer pairs. The mask comes before `group_limit`, which then chooses
    among the rank's groups.
    """

    experts_alike = True

    step_wide = True
    random = True

    @dataclass
    class Config:
        """rate: p, the share of dropped steps. ranks: the number of parts that the experts are cut into;
        default: the run's expert-parallel ranks.
        """

        rate: float = 0.3
        ranks: int | None = None

        def __post_init__(self) -> None:
            if not 0 < self.rate <= 1:
                raise ValueError("rate must be above 0 and at most 1")
            if self.ranks is not None and self.ranks < 2:
                raise ValueError("ranks must be at least 2")

    @classmethod
    def num_candidates(cls, options: Config, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """All experts of one rank, or all experts in a step that is not dropped."""
        ranks = options.ranks or expert_parallel
        size = num_experts // ranks
        return Candidates(num_experts, ranks, (1, ranks), (size, size))

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        ranks = options.ranks or expert_parallel
        if ranks == 1:
            raise ValueError(
                "parallel.expert is 1, where every expert is at home and nothing would be dropped; set ranks "
                "to the number that the run is meant for, or leave the mask out"
            )
        if moe.num_experts % ranks:
            raise ValueError(
                f"ranks is {ranks}, which does not divide the {moe.num_experts} experts (moe.num_experts); "
                "choose one that does"
            )

    def forward(self, scored: Scored, context: StepContext) -> Tensor | None:
        """Return the candidates, bool [T, E], with equal rows; None in a step that is not dropped."""
        if not self._dropped(context):
            return None
        expert_E = torch.arange(self.dims.num_experts, device=scored.scores_TE.device)
        allowed_E = expert_E // (self.dims.num_experts // self._ranks) == context.micro_batch % self._ranks
        return allowed_E.expand_as(scored.scores_TE)

    def keeps_tokens_local(self, context: StepContext) -> bool:
        """Whether this step is dropped and `ranks` is the real number of ranks."""
        real = self._ranks == self.dims.expert_parallel and self.dims.follows_data
        return real and self._dropped(context)

    @property
    def _ranks(self) -> int:
        return int(self.config.ranks or self.dims.expert_parallel)

    def _dropped(self, context: StepContext) -> bool:
        if not self.training:
            return False
        # Drawn on the CPU, since the host branches on it; layer 0: the same in all layers.
        first = torch.zeros(1, dtype=torch.int64, device="cpu")
        draw_key = context.draw_key(0, "gating dropout")
        return rng.uniform(draw_key, first, 1, kernels=self.dims.kernels).item() < self.config.rate
