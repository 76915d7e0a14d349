"""`table`: every token goes to the experts in the scorer's tables."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import FixedK, valid_TK
from megamoe.registry import register


@register("selector", "table")
class Table(FixedK):
    """The k experts of the scorer `hash`, each with weight 1.

    If independent tables agree on a token's expert, it has that expert twice: two pairs of weight 1.

    Source: Roller et al. 2021 (Hash Layers), section 3, where the output is the expert's own, without a gate.
    """

    @dataclass
    class Config(FixedK.Config):
        """k: the number of tables, and so of experts per token."""

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"fixed_weights", "fixed_count"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"table_TK": "by which each token goes"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {
            "bias": "which moves no choice made by a table",
            "mask": "but a token whose expert is taken away has no other",
        }

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """Accept any k: tables may agree on a token's expert."""

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return T * k pairs of weight 1."""
        expert_TK = scored.extras["table_TK"]
        weight_TK: Tensor = torch.ones_like(expert_TK, dtype=torch.float32)
        return Pairs.of_choices(expert_TK, weight_TK)

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Return the pairs of these choices, each of weight 1."""
        weight_TK = torch.ones_like(expert_TK, dtype=torch.float32)
        return Pairs.of_choices(expert_TK, weight_TK, valid_TK(expert_TK, count_T))
