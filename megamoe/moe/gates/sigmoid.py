"""`sigmoid`: each expert's gate value by itself."""

from torch import Tensor

from megamoe.kernels.router import masked
from megamoe.moe.gates.biased import BiasedGate
from megamoe.registry import register


@register("gate", "sigmoid")
class SigmoidGate(BiasedGate):
    """p = sigmoid(s / temperature) for candidates, 0 for the others.

    Options: see `BiasedGate`. Source: Lewis et al. 2021 (BASE); Chi et al. 2022 (X-MoE) eq. 3; DeepSeek-V3.
    """

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """[T, E] fp32 -> [T, E] fp32, each value in (0, 1)."""
        probs_TE = self._cooled(scores_TE).sigmoid()
        return probs_TE if candidates_TE is None else masked(probs_TE, candidates_TE, 0.0)
