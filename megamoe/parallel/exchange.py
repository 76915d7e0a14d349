"""The nodes that rows of the experts' exchange cross (`parallel.exchange`, `parallel.node_size`)."""

from dataclasses import replace

from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import moe_layer_numbers
from megamoe.moe.capabilities import provides
from megamoe.moe.dispatch.choice import mean_nodes
from megamoe.moe.router import mean_choices
from megamoe.parallel.launch import ranks_of_machine
from megamoe.parallel.layout import Layout
from megamoe.registry import get_part

WORTH_IT = 1.25  # a token's experts over its nodes, from which the exchange `auto` sends rows by node


def with_nodes(config: RunConfig, layout: Layout) -> Layout:
    """Return the layout with the number of nodes between which rows are exchanged; it is not checked here."""
    return replace(layout, nodes=_exchange_nodes(config, layout))


def uses_nodes(config: RunConfig) -> bool:
    """Whether the exchange may depend on the ranks of a node."""
    return config.parallel.expert > 1 and node_use(config) != "none" and bool(moe_layer_numbers(config))


def has_fixed_shares(config: RunConfig) -> bool:
    """Whether a capacity lets each rank send each other one a fixed number of rows."""
    return any(provides("fixed_shares", kind.moe.router.capacity) for kind in kinds(config))


def _exchange_nodes(config: RunConfig, layout: Layout) -> int:
    if not uses_nodes(config) or (has_fixed_shares(config) and node_use(config) == "if_worth"):
        return 1
    nodes = num_nodes(layout, node_size(config, layout)) or 1
    if nodes == 1 or node_use(config) == "always":
        return nodes
    choices = [(mean_choices(kind.moe), kind) for kind in kinds(config)]
    pairs = sum(len(kind.layers) * chosen for chosen, kind in choices)
    rows = sum(len(kind.layers) * mean_nodes(kind.moe, nodes, chosen) for chosen, kind in choices)
    return nodes if pairs >= WORTH_IT * rows else 1


def node_size(config: RunConfig, layout: Layout) -> int:
    """Return `parallel.node_size`, or what the launcher says; one node has all ranks if it says nothing."""
    return config.parallel.node_size or ranks_of_machine() or layout.ranks


def node_use(config: RunConfig) -> str:
    """Return `Dispatcher.node_use` of the chosen exchange."""
    return get_part("exchange", config.parallel.exchange.name).node_use


def num_nodes(layout: Layout, size: int) -> int | None:
    """Return the nodes of an expert group, None if they do not hold equal parts of it."""
    ranks = layout.expert_ranks
    if ranks <= size:
        return 1 if size % ranks == 0 else None
    return ranks // size if ranks % size == 0 and size % layout.expert_tensor == 0 else None
