"""`softmax`: gating values that compete and sum to 1."""

from torch import Tensor

from megamoe.kernels.router import masked, softmax
from megamoe.moe.score_functions.biased import BiasedScoreFunction
from megamoe.registry import register


@register("score_function", "softmax")
class SoftmaxScoreFunction(BiasedScoreFunction):
    """p = softmax(s / temperature) over the candidates; an expert that is none has exactly 0.

    Options: see `BiasedScoreFunction`. Source: Shazeer et al. 2017 eq. 2; Chi et al. 2022 (X-MoE) eq. 3.
    """

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """[T, E] fp32 -> [T, E] fp32, rows summing to 1; a row without any candidate is 0."""
        scores_TE = self._cooled(scores_TE)
        if candidates_TE is None:
            return softmax(scores_TE)
        probs_TE = softmax(masked(scores_TE, candidates_TE, float("-inf")))
        return masked(probs_TE, candidates_TE, 0.0)  # NaN where there is no candidate
