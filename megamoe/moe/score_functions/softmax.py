"""`softmax`: probabilities that compete and sum to 1."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megamoe.kernels.router import masked, masked_softmax, softmax
from megamoe.moe.score_functions.expert_bias import BiasedScoreFunction
from megamoe.registry import register


@register("score_function", "softmax")
class SoftmaxScoreFunction(BiasedScoreFunction):
    """p = softmax(s / temperature) over the candidates or all experts; an expert that is no candidate has 0.

    `over` matters if masks remove experts. candidates: the softmax runs over the candidates, whose p sum to
    1, as in MoEC's expert dropout. all: it runs over all experts, and the masks only restrict the choice, so
    that the p of the candidates sum to less than 1, as in DeepSeek-V2's device limit. Raw weights and the
    capacity's priorities use these p. Whatever uses shares of a token's p is the same for both: renormalised
    weights, a threshold, draws, and the loss `switch_balance`.

    Source: Shazeer et al. 2017 eq. 2; Chi et al. 2022 (X-MoE) eq. 3; over all: DeepSeek-V2, section 2.2.1.
    """

    @dataclass
    class Config(BiasedScoreFunction.Config):
        """temperature: divides the scores. bias_update: u, the bias's change per step; 0: no bias.
        bias_until: the last step that changes the bias; null: all steps do. mean_experts: K_e, the mean
        number of a token's experts that compute. over: the experts that the
        softmax runs over if masks remove some, see the class.
        """

        over: Literal["candidates", "all"] = "candidates"

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        plain = {"plain_softmax"} if options.temperature == 1 else set()
        whole = {"sums_to_1"} if options.over == "candidates" else set()
        return super().provides(options) | {"softmax_of_scores"} | plain | whole

    @property
    def over_all(self) -> bool:
        """Whether masks restrict the choice alone."""
        return bool(self.config.over == "all")

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """[T, E] fp32 -> [T, E] fp32; rows sum to 1, or to at most 1 over the candidates with over: all.

        A row without candidates is 0.
        """
        scores_TE, kernels = self._scaled(scores_TE), self.dims.kernels
        if self.over_all:
            return masked(softmax(scores_TE, kernels), candidates_TE, 0.0, kernels)
        return masked_softmax(scores_TE, candidates_TE, kernels)

    def log_values(self, scores: Tensor) -> Tensor:
        """Return log p plus the logarithm of the token's sum of exponentials."""
        return self._scaled(scores)
