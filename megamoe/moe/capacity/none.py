"""`none`: dropless."""

from typing import Any

from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.registry import register


@register("capacity", "none")
class Dropless(Part):
    """Every pair is kept."""

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        return {"dropless"}

    def forward(self, pairs: Pairs, scored: Scored, context: StepContext) -> None:
        """Return None: no pair is dropped."""
