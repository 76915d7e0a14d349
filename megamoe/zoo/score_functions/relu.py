"""`relu`: probabilities that are exactly 0 for many experts."""

from typing import Any

from torch import Tensor

from megamoe.kernels.router import masked
from megamoe.moe.part import ScoreFunction
from megamoe.registry import register


@register("score_function", "relu")
class ReluScoreFunction(ScoreFunction):
    """p = max(s, 0) for candidates, 0 for the others.

    It is not monotone: experts of negative scores have the same p, 0. Choices are made by p. The selector
    `above` takes the experts whose p is not 0, and a loss holds their number. A selector that gives every
    token an expert is refused: where too few scores are positive, it would take the first experts with
    weight 0.

    Source: Wang et al. 2024 (ReMoE, arXiv 2412.14711), section 3.2, eq. 5.
    """

    elementwise = True

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        return super().provides(options) | {"zeros"}

    @classmethod
    def requires(cls, options: Any) -> dict[str, str]:
        return {"may_choose_none": "since an expert of p = 0 would get the token with weight 0"}

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """[T, E] fp32 -> [T, E] fp32, each value at least 0."""
        return masked(scores_TE.relu(), candidates_TE, 0.0, self.dims.kernels)
