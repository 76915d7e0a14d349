"""`gating_dropout`: in some steps every token stays on its own rank, and nothing is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.part import Candidates, Example, Mask, StepContext
from megamoe.moe.routing import Scored
from megamoe.registry import register


@register("mask", "gating_dropout")
class GatingDropout(Mask):
    """With probability `rate`, a training step's tokens may choose only the experts of their own rank.

    One draw a step, by (seed, step): the same on all ranks, in all micro batches and all layers. A rank's
    experts are E/ranks neighbours; a token's own rank is its micro batch's number modulo `ranks`, since
    micro batches are dealt to the ranks in turn. So the outcome depends on `ranks`, not on the layout; where
    `ranks` is the real number of expert-parallel ranks, a dropped step does no all-to-all. In evaluation
    nothing is dropped.

    Source: Liu et al. 2022, Gating Dropout, section 3 ("Gate-Drop"; Gate-Expert-Drop, which skips the
    experts too, is not built).

    Caveats: in the paper a coordinator broadcasts the decision, ours needs no message; one decision for all
    layers is a reading. Among several experts of a rank the score function, computed over them, chooses. A
    rank with fewer experts than k gives its tokens fewer pairs. It stands before `group_limit`, which then
    looks for groups at home.
    """

    step_wide = True
    random = True

    @dataclass
    class Config:
        """rate: p, the share of steps dropped. ranks: into how many parts the experts are cut; default:
        the expert-parallel ranks of the run."""

        rate: float = 0.3
        ranks: int | None = None

        def __post_init__(self) -> None:
            if not 0 < self.rate <= 1:
                raise ValueError("rate must be above 0 and at most 1")
            if self.ranks is not None and self.ranks < 2:
                raise ValueError("ranks must be at least 2")

    @classmethod
    def num_candidates(cls, options: Config, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """All experts of one rank, or of all: the steps that are not dropped leave all."""
        ranks = options.ranks or expert_parallel
        size = num_experts // ranks
        return Candidates(num_experts, ranks, (1, ranks), (size, size))

    @classmethod
    def examples(cls, num_experts: int, num_choices: int) -> list[Example]:
        """On so many ranks whatever the layout."""
        return [Example({"ranks": min(8, num_experts // 4), "rate": 0.5})]

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """More than one rank, and as many experts on each."""
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
        """bool [T, E], every row the same; None in a step that is not dropped."""
        if not self._dropped(context):
            return None
        expert_E = torch.arange(self.dims.num_experts, device=scored.scores_TE.device)
        allowed_E = expert_E // (self.dims.num_experts // self._ranks) == context.micro_batch % self._ranks
        return allowed_E.expand_as(scored.scores_TE)

    def keeps_tokens_local(self, context: StepContext) -> bool:
        """Whether this step is dropped and the ranks are the real ones."""
        real = self._ranks == self.dims.expert_parallel and self.dims.follows_data
        return real and self._dropped(context)

    @property
    def _ranks(self) -> int:
        return int(self.config.ranks or self.dims.expert_parallel)

    def _dropped(self, context: StepContext) -> bool:
        if not self.training:
            return False
        # Drawn on the host, which must know; layer 0: the same in all layers.
        first = torch.zeros(1, dtype=torch.int64, device="cpu")
        draw_key = context.draw_key(0, "gating dropout")
        return rng.uniform(draw_key, first, 1, kernels=self.dims.kernels).item() < self.config.rate
