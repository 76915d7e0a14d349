"""The nodes that rows of the experts' exchange cross (`parallel.exchange`, `parallel.node_size`)."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from megamoe.config.groups import kinds
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import Problem
from megamoe.moe.dispatch.choice import mean_nodes
from megamoe.moe.router import mean_choices
from megamoe.moe.suggestions import provides
from megamoe.parallel.launch import ranks_of_machine
from megamoe.parallel.layout import Layout, divisors
from megamoe.registry import get_part

WORTH_IT = 1.25  # a token's experts over its nodes, from which the exchange `auto` sends rows by node


def with_nodes(config: RunConfig, layout: Layout) -> Layout:
    """Return the layout with the number of nodes between which rows are exchanged; it is not checked here."""
    return replace(layout, nodes=_exchange_nodes(config, layout))


def uses_nodes(config: RunConfig) -> bool:
    """Whether the exchange may depend on the ranks of a node."""
    return config.parallel.expert > 1 and _node_use(config) != "none" and bool(moe_layer_numbers(config))


def exchange_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield a size of nodes that does not fit."""
    parallel, size = config.parallel, _node_size(config, layout)
    if parallel.exchange_dtype == "fp8" and not hasattr(torch, "float8_e4m3fn"):
        yield Problem("parallel.exchange_dtype", "fp8: this PyTorch has no float8_e4m3fn; set it to model")
    yield from _fixed_share_problems(config, layout)
    if parallel.node_size is not None and layout.ranks % size:
        yield Problem(
            "parallel.node_size",
            f"{size} does not divide the number of ranks {layout.ranks}; {_legal(layout)}",
        )
    elif _node_use(config) != "always" or not uses_nodes(config):
        return
    elif parallel.node_size is None and ranks_of_machine() is None:
        yield Problem("parallel.node_size", f"not set, and the launcher does not say it; {_legal(layout)}")
    elif _nodes(layout, size) is None:
        whence = "" if parallel.node_size is not None else " (from the launcher)"
        yield Problem(
            "parallel.node_size",
            f"{size}{whence} cuts the {layout.expert_ranks} ranks of an expert group (parallel.expert x "
            f"expert_tensor) unevenly; {_legal(layout)}, or set parallel.exchange=direct",
        )


def _has_fixed_shares(config: RunConfig) -> bool:
    return any(provides("fixed_shares", kind.moe.router.capacity) for kind in kinds(config))


def _fixed_share_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield where ranks could not know how many rows they send each other."""
    if not _has_fixed_shares(config) or layout.expert_ranks == 1 or not moe_layer_numbers(config):
        return
    exchange = config.parallel.exchange.name
    if not get_part("exchange", exchange).takes_places:
        yield Problem(
            "parallel.exchange",
            f"{exchange} does not send fixed shares (moe.router.capacity.pad); legal: auto, direct",
        )
    if config.model.architecture != "decoder":
        yield Problem(
            "moe.router.capacity.pad",
            f"the micro batches of an {config.model.architecture} have padding: ranks differ in "
            "their numbers of tokens; legal with expert ranks: false",
        )


def _exchange_nodes(config: RunConfig, layout: Layout) -> int:
    if not uses_nodes(config) or (_has_fixed_shares(config) and _node_use(config) == "if_worth"):
        return 1
    nodes = _nodes(layout, _node_size(config, layout)) or 1
    if nodes == 1 or _node_use(config) == "always":
        return nodes
    choices = [(mean_choices(kind.moe), kind) for kind in kinds(config)]
    pairs = sum(len(kind.layers) * chosen for chosen, kind in choices)
    rows = sum(len(kind.layers) * mean_nodes(kind.moe, nodes, chosen) for chosen, kind in choices)
    return nodes if pairs >= WORTH_IT * rows else 1


def _node_size(config: RunConfig, layout: Layout) -> int:
    """Return `parallel.node_size`, or what the launcher says; one node has all ranks if it says nothing."""
    return config.parallel.node_size or ranks_of_machine() or layout.ranks


def _node_use(config: RunConfig) -> str:
    use: str = get_part("exchange", config.parallel.exchange.name).node_use
    return use


def _nodes(layout: Layout, size: int) -> int | None:
    """Return the nodes of an expert group, None if they do not hold equal parts of it."""
    ranks = layout.expert_ranks
    if ranks <= size:
        return 1 if size % ranks == 0 else None
    return ranks // size if ranks % size == 0 and size % layout.expert_tensor == 0 else None


def _legal(layout: Layout) -> str:
    legal = [size for size in divisors(layout.ranks) if _nodes(layout, size) is not None]
    return f"legal on {layout.ranks} ranks: {', '.join(map(str, legal))}"
