"""`similarity`: keeps the experts' rows of the router's weight orthogonal and of norm 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "similarity")
class Similarity(Part):
    """sum_ij |(W W^T)_ij - I_ij|, W [E, H] the router's weight: tokens that are alike get scores that are.

    Source: Omi et al. 2025 (similarity-preserving routers, arXiv 2506.14038), L_orth with the norm of its
    appendix A.3, p = 1: the sum over all E^2 entries.

    Scope: the weight alone, so it does not depend on tokens.

    Caveats: the paper initialises W to be orthogonal; ours starts as all weights, and the loss brings it
    there.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.01

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"rows_EH": "the rows of the router's weight"}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        weight_EH = routing.extras["rows_EH"]
        gram_EE = weight_EH @ weight_EH.T
        loss = (gram_EE - torch.eye(len(gram_EE), device=gram_EE.device)).abs().sum()
        return loss if routing.num_tokens else loss * 0
