"""`sqrt_softplus`: positive probabilities of each expert on its own, which do not saturate."""

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.router import masked
from megamoe.moe.score_functions.expert_bias import BiasedScoreFunction
from megamoe.registry import register

_LOWEST = -15.0  # below it softplus(s) is exp(s) in fp32


@register("score_function", "sqrt_softplus")
class SqrtSoftplusScoreFunction(BiasedScoreFunction):
    """p = sqrt(log(1 + exp(s / temperature))) for candidates, 0 for the others.

    For the options see `BiasedScoreFunction`. DeepSeek-V4 chooses by p + b, and weights with p over the sum
    of the chosen: the selector's `weights: renormalised`.

    Source: DeepSeek-V4, as in its transformers module.
    """

    elementwise = True

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """[T, E] fp32 -> [T, E] fp32, each value above 0."""
        # Where softplus underflows, the root's derivative would be 0 / 0.
        probs_TE = functional.softplus(self._scaled(scores_TE)).clamp_min(_tiny(scores_TE)).sqrt()
        return masked(probs_TE, candidates_TE, 0.0, self.dims.kernels)

    @property
    def small_slope(self) -> float:
        return 0.5 / self.config.temperature

    def log_values(self, scores: Tensor) -> Tensor:
        """Return log p; precise where p underflows."""
        scores = self._scaled(scores)
        return 0.5 * functional.softplus(scores).clamp_min(_tiny(scores)).log().where(
            scores > _LOWEST, scores
        )


def _tiny(values: Tensor) -> float:
    return torch.finfo(values.dtype).tiny
