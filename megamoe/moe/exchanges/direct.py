"""`direct`: a row for each of a token's experts, straight to the rank that holds the expert."""

from dataclasses import dataclass

from megamoe.moe.dispatch.all_to_all import AllToAllDispatch
from megamoe.registry import register


@register("exchange", "direct")
class Direct(AllToAllDispatch):
    """A row for each of a token's experts goes straight to the rank that holds the expert, and back.

    Source: GShard (Lepikhin et al. 2020), section 3.2; with uneven splits in place of a capacity.
    """

    @dataclass
    class Config:
        """No options."""
