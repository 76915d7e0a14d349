"""`table`: every token goes to the experts in the scorer's tables."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import FixedK, chosen_shares_TK, valid_TK
from megamoe.registry import register


@register("selector", "table")
class Table(FixedK):
    """The k experts of the scorer's tables (extra `table_TK`), with one of three kinds of weights.

    one: 1 (Hash Layers). raw: p, and renormalised: p over the sum of the k, of a scorer that learns
    (DeepSeek-V4, whose factor is `scale`). If independent tables agree on a token's expert, it has that
    expert twice.

    Source: Roller et al. 2021 (Hash Layers), section 3, where the output is the expert's own, without a gate;
    learned weights: DeepSeek-V4.
    """

    @dataclass
    class Config(FixedK.Config):
        """k: the number of tables, and so of experts per token. weights: see the class. scale: a constant
        factor on the weights.
        """

        weights: Literal["one", "raw", "renormalised"] = "one"
        scale: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.scale > 0:
                raise ValueError("scale must be positive")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        kinds = {"one": {"fixed_weights"}, "renormalised": {"normalised"}}
        return {"fixed_count"} | kinds.get(options.weights, set())

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
        """Return T * k pairs."""
        expert_TK = scored.extras["table_TK"]
        return Pairs.of_choices(expert_TK, self._weights(scored, expert_TK, None))

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Return the pairs of these choices, weighted in the same way."""
        kept_TK = valid_TK(expert_TK, count_T)
        return Pairs.of_choices(expert_TK, self._weights(scored, expert_TK, kept_TK), kept_TK)

    def _weights(self, scored: Scored, expert_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
        if self.config.weights == "one":
            weight_TK = torch.ones_like(expert_TK, dtype=torch.float32)
        elif self.config.weights == "raw":
            weight_TK = scored.probs_TE.gather(1, expert_TK)
        else:
            weight_TK = chosen_shares_TK(scored, expert_TK, kept_TK)
        return weight_TK if self.config.scale == 1 else weight_TK * self.config.scale
