"""`auto`: `by_node` where a token's experts are many more than its nodes, else `direct`."""

from dataclasses import dataclass

from megamoe.moe.dispatch.between_nodes import ByNodeDispatch
from megamoe.registry import register


@register("exchange", "auto")
class Auto(ByNodeDispatch):
    """`by_node` where the experts of a group lie on several nodes, evenly, and a token has at least 1.25
    times as many experts as nodes on average; else `direct`.

    Source: none; the ratio is where the rows saved between nodes outweigh the second copy inside one.
    """

    node_use = "if_worth"
    takes_places = True  # with them no rows travel by node

    @dataclass
    class Config:
        """No options."""
