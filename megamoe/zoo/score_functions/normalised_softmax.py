"""`normalised_softmax`: a softmax of scores with the same mean and spread for every token."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megamoe.kernels.router import masked_softmax
from megamoe.moe.score_functions.expert_bias import BiasedScoreFunction
from megamoe.registry import register

SMALLEST_VARIANCE = 1e-12  # of a token's scores; equal scores give p = 1/E


@register("score_function", "normalised_softmax")
class NormalisedSoftmaxScoreFunction(BiasedScoreFunction):
    """p = softmax(scale (s - mean) / std / temperature); mean and std of the token's scores over all experts.

    A larger scale makes p sharper, whatever the size of the scores. For the bias see `BiasedScoreFunction`.

    Source: Wei et al. 2024 (Skywork-MoE, arXiv 2406.06563), section 4.1, eq. 6; lambda is 1 there, and the
    scores have a bias (`linear` with `bias`).

    Caveats: the paper does not say which variance; ours is the population's (divided by E) plus 1e-12. The
    code that the same group released with MoE++ divides by E - 1, a larger std. It has no masks: ours take
    mean and std over all experts, and the softmax over the candidates. Choices are made by p.
    """

    monotone = False  # log p needs the whole row

    @dataclass
    class Config(BiasedScoreFunction.Config):
        """scale: the paper's lambda. temperature: divides the scaled scores. bias_update: u, the bias's
        change per step; 0: no bias. bias_until: the last step that changes the bias; null: all steps do.
        mean_experts: K_e, the mean number of a token's experts that compute.
        """

        scale: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.scale > 0:
                raise ValueError("scale must be positive")

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        return super().provides(options) | {"sums_to_1"}

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """[T, E] fp32 -> [T, E] fp32; rows sum to 1. A row without candidates is 0."""
        centred_TE = scores_TE - scores_TE.mean(dim=-1, keepdim=True)
        variance_T1 = centred_TE.square().mean(dim=-1, keepdim=True)
        factor_T1 = self.config.scale * (variance_T1 + SMALLEST_VARIANCE).rsqrt()
        return masked_softmax(self._scaled(centred_TE * factor_T1), candidates_TE, self.dims.kernels)
