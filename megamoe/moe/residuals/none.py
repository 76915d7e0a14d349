"""`none`: a router that scores by its own layer alone."""

from torch import Tensor

from megamoe.moe.part import Residual, StepContext
from megamoe.registry import register


@register("residual", "none")
class NoResidual(Residual):
    """Nothing is added to the scores, and no layer reads them."""

    reads_before = False

    def forward(self, scores_TE: Tensor, before_TE: Tensor | None, context: StepContext) -> Tensor:
        """Return the scores."""
        return scores_TE
