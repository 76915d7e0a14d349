"""`none`: dropless."""

from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.registry import register


@register("capacity", "none")
class Dropless(Part):
    """Every pair survives."""

    def forward(self, pairs: Pairs, scored: Scored, context: StepContext) -> None:
        """None: no pair is dropped."""
