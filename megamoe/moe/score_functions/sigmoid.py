"""`sigmoid`: the probability of each expert on its own."""

from torch import Tensor
from torch.nn import functional

from megamoe.kernels.router import masked
from megamoe.moe.score_functions.expert_bias import BiasedScoreFunction
from megamoe.registry import register


@register("score_function", "sigmoid")
class SigmoidScoreFunction(BiasedScoreFunction):
    """p = sigmoid(s / temperature) for candidates, 0 for the others.

    For the options see `BiasedScoreFunction`.

    Source: Lewis et al. 2021 (BASE); Chi et al. 2022 (X-MoE) eq. 3; DeepSeek-V3.
    """

    elementwise = True

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """[T, E] fp32 -> [T, E] fp32, each value in (0, 1)."""
        return masked(self._scaled(scores_TE).sigmoid(), candidates_TE, 0.0, self.dims.kernels)

    def log_values(self, scores: Tensor) -> Tensor:
        """Return log p; precise near 0 and 1."""
        return functional.logsigmoid(self._scaled(scores))
