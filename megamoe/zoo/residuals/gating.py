"""`gating`: the scores of the layer before, through a learned matrix, are added to those of this layer."""

from typing import Any

import torch
from torch import Tensor, nn

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import scores
from megamoe.moe.capabilities import capabilities
from megamoe.moe.part import Dims, Residual, StepContext, mean_row_norm
from megamoe.moe.validation import provider
from megamoe.registry import register


@register("residual", "gating")
class GatingResidual(Residual):
    """G_j = s_j + W_g G_(j-1): s_j are the scorer's scores, G_j what all later stages take for the scores.

    W_g [E, E] is learned. G_(j-1), with gradient, is that of the last MoE layer before with a residual and
    as many experts; without one, G_j = s_j. Its W_g is there all the same and has no effect, so that all
    layers of one configuration have the same weights. Any scorer will do whose scores no other part takes
    apart.

    Source: Jin et al. 2024 (MoE++, arXiv 2410.07348), section 3.2, eq. 6. The models that the authors have
    released add the logits with gradient, and have the matrix in the first layer too.

    Caveats: the paper leaves the start of W_g open; ours starts as all weights of the router.
    """

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        return {"scores_before"}

    @classmethod
    def refuses(cls, options: Any) -> dict[str, str]:
        return {
            "log_probs": "and log p plus scores is no log p",
            "ranking_TE": "by which choices are made, without the residual",
            "clean_TE": "which is compared with the scores, without the residual",
            "sampling_scores_TE": "which is compared with the scores, without the residual",
        }

    @classmethod
    def check(cls, options: Any, moe: MoEConfig, expert_parallel: int) -> None:
        if provider(moe, "table_TK") and "fixed_weights" in capabilities(moe.router.selector):
            raise ValueError(
                "a table gives each token its experts and their weights, whatever the scores; set "
                "residual: none"
            )

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.num_experts))
        dims.init_weight(self.weight, "gating residual")

    def metrics(self) -> dict[str, Tensor]:
        """Return the mean L2 norm of the experts' rows of the weight."""
        return {"norm": mean_row_norm(self.weight)}

    def forward(self, scores_TE: Tensor, before_TE: Tensor | None, context: StepContext) -> Tensor:
        """[T, E] fp32, and [T, E] fp32 of the layer before -> [T, E] fp32."""
        if before_TE is None:  # a product all the same: its weight needs a gradient, which is 0
            before_TE = torch.zeros_like(scores_TE)
        return scores_TE + scores(before_TE, self.weight, self.dims.kernels)
