"""The exchanges that `parallel.exchange` names: how rows travel to the ranks of their experts."""

from megamoe.moe.dispatch.by_node import ByNodeDispatch
from megamoe.moe.dispatch.direct import DirectDispatch
from megamoe.moe.dispatch.dispatcher import NodeUse
from megamoe.registry import register


@register("exchange", "direct")
class Direct(DirectDispatch):
    """A row for each of a token's experts goes straight to the rank that holds the expert, and back.

    Source: GShard (Lepikhin et al. 2020), section 3.2; with uneven splits in place of a capacity.
    """


@register("exchange", "by_node")
class ByNode(ByNodeDispatch):
    """A row crosses to another node once, to the rank with the sender's number there, and is copied to the
    ranks of the experts inside the node; the weighted outputs are summed there, and one row returns.

    Source: DeepSeek-V3, section 3.2.2.
    """

    node_use: NodeUse = "always"


@register("exchange", "auto")
class Auto(ByNodeDispatch):
    """`by_node` where the experts of a group lie on several nodes, evenly, and a token has at least 1.25
    times as many experts as nodes on average; else `direct`.

    Source: none; the ratio is where the rows saved between nodes outweigh the second copy inside one.
    """

    node_use: NodeUse = "if_worth"
    knows_slots = True  # with them no rows travel by node
