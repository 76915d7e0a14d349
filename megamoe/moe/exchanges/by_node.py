"""`by_node`: a row crosses to another node once, however many of its token's experts are there."""

from dataclasses import dataclass

from megamoe.moe.dispatch.between_nodes import ByNodeDispatch
from megamoe.registry import register


@register("exchange", "by_node")
class ByNode(ByNodeDispatch):
    """A row crosses to another node once, to the rank with the sender's number there, and is copied to the
    ranks of the experts inside the node; the weighted outputs are summed there, and one row returns.

    Source: DeepSeek-V3, section 3.2.2.
    """

    node_use = "always"

    @dataclass
    class Config:
        """No options."""
