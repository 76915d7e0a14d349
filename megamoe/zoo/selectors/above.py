"""`above`: every token goes to all experts whose probability is above a value."""

from dataclasses import dataclass

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import largest
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import WeightedByP, first_choices
from megamoe.moe.validation import refuse_more_than_experts
from megamoe.registry import register


@register("selector", "above")
class Above(WeightedByP):
    """All candidates with p > value, in order of choice, and at least the `at_least` best; the weight is p.

    With the score function `relu` and value 0 these are the experts with a positive score, as in ReMoE. A
    token of which no score is positive has no expert: the residual and the shared experts alone pass it on.
    `at_least` is for other score functions, with which it prevents this. With a softmax and a value above 0
    it is the choice of the dense-to-sparse gate.

    The capacity counts with k = `mean`.

    Source: Wang et al. 2024 (ReMoE, arXiv 2412.14711), eq. 5; Nie et al. 2021 (EvoMoE, arXiv 2112.14397),
    section 4.2, which leaves a token's least number of experts open; ours is an option.
    """

    @dataclass
    class Config:
        """value: what p must exceed. at_least: experts that every token has. mean: the expected mean number
        of experts per token, for the capacity and for plans.
        """

        value: float = 0.0
        at_least: int = 0
        mean: int = 1

        def __post_init__(self) -> None:
            if not self.value >= 0:
                raise ValueError("value must be at least 0: p are")
            if self.at_least < 0 or self.mean < 1:
                raise ValueError("at_least must be at least 0, and mean at least 1")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"may_choose_none"} if options.at_least == 0 else set()

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {} if options.value > 0 else {"zeros": "without which value: 0 would choose every expert"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"bias": "which does not move p, and so not the choice"}

    @classmethod
    def wanted(cls, options: Config, num_experts: int) -> int:
        return options.at_least

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_more_than_experts("at_least", options.at_least, moe)
        refuse_more_than_experts("mean", options.mean, moe)

    @property
    def num_choices(self) -> int:
        return int(self.config.mean)

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return `at_least` pairs or more per token, fewer if it has fewer candidates."""
        probs_TE = scored.probs_TE.detach()
        chosen_TE = probs_TE > self.config.value
        if self.config.at_least > 0:
            best_TK = largest(scored.ranking_TE, self.config.at_least)
            chosen_TE = chosen_TE.scatter(1, best_TK, True) & scored.ranking_TE.isfinite()
        order_TE = scored.ranking_TE.masked_fill(~chosen_TE, float("-inf"))
        expert_TE = order_TE.argsort(dim=-1, descending=True, stable=True)
        return first_choices(expert_TE, chosen_TE.sum(dim=-1), scored.probs_TE)
