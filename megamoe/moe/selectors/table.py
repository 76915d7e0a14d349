"""`table`: every token goes where the scorer's tables say."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import Selector, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.compatibility import refuse_masks
from megamoe.registry import register


@register("selector", "table")
class Table(Selector):
    """The k experts of scorer `hash`, each with weight 1.

    A token whose independent tables agree has that expert twice: two pairs of weight 1. Source: Roller et
    al. 2021 (Hash Layers), section 3, whose output is the expert's own, without a score function.
    """

    @dataclass
    class Config:
        """k: tables, and so experts a token."""

        k: int = 1

        def __post_init__(self) -> None:
            if self.k < 1:
                raise ValueError("k must be at least 1")

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """Only scorer `hash` has tables; nothing moves their choice."""
        scorer = moe.router.scorer.name
        if scorer != "hash":
            raise ValueError(f"the scorer is {scorer!r}, which makes no table; set scorer: hash")
        if getattr(moe.router.score_function.options, "bias_update", 0) > 0:
            raise ValueError("score_function.bias_update moves no choice made by a table; leave it out")
        refuse_masks(moe, "a token whose expert is taken away has no other")

    @property
    def num_choices(self) -> int:
        """The k that capacity counts with."""
        return int(self.config.k)

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """T*k pairs of weight 1."""
        expert_TK = scored.extras["table_TK"]
        weight_TK: Tensor = torch.ones_like(expert_TK, dtype=torch.float32)
        return Pairs.of_choices(expert_TK, weight_TK)
