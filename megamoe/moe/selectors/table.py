"""`table`: every token goes where the scorer's tables say."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.moe.part import Example, Selector, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.registry import register


@register("selector", "table")
class Table(Selector):
    """The k experts of scorer `hash`, each with weight 1.

    A token whose independent tables agree has that expert twice: two pairs of weight 1. Source: Roller et
    al. 2021 (Hash Layers), section 3, whose output is the expert's own, without a gate.
    """

    @dataclass
    class Config:
        """k: tables, and so experts a token."""

        k: int = 1

        def __post_init__(self) -> None:
            if self.k < 1:
                raise ValueError("k must be at least 1")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        """Weights of 1."""
        return {"fixed_weights"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        """The tables."""
        return {"table_TK": "by which each token goes"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        """What would move the choice."""
        return {
            "bias": "which moves no choice made by a table",
            "mask": "but a token whose expert is taken away has no other",
        }

    @classmethod
    def examples(cls, num_experts: int, num_choices: int) -> list[Example]:
        """As many choices as asked for."""
        return [Example({"k": num_choices})]

    @property
    def num_choices(self) -> int:
        """The k that capacity counts with."""
        return int(self.config.k)

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """T*k pairs of weight 1."""
        expert_TK = scored.extras["table_TK"]
        weight_TK: Tensor = torch.ones_like(expert_TK, dtype=torch.float32)
        return Pairs.of_choices(expert_TK, weight_TK)
