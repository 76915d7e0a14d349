"""Checks of the experts' exchange (`parallel.exchange`) against the ranks, the batches and the MoE layers."""

from collections.abc import Iterator

import torch

from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import Problem, UserError
from megamoe.objectives.objective import objective_class
from megamoe.parallel.exchange import has_fixed_shares, node_size, node_use, num_nodes, uses_nodes
from megamoe.parallel.launch import ranks_of_machine
from megamoe.parallel.layout import Layout, divisors
from megamoe.registry import get_part


def exchange_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield what does not fit the exchange, and a size of nodes that does not fit the ranks."""
    parallel, size = config.parallel, node_size(config, layout)
    if parallel.exchange_dtype == "fp8" and not hasattr(torch, "float8_e4m3fn"):
        yield Problem("parallel.exchange_dtype", "fp8: this PyTorch has no float8_e4m3fn; set it to model")
    yield from _fixed_share_problems(config, layout)
    yield from _weight_problems(config, layout)
    key = "parallel.node_size"
    if parallel.node_size is not None and layout.ranks % size:
        yield Problem(key, f"{size} does not divide the number of ranks {layout.ranks}; {_legal(layout)}")
    elif node_use(config) != "always" or not uses_nodes(config):
        return
    elif parallel.node_size is None and ranks_of_machine() is None:
        yield Problem(key, f"not set, and the launcher does not say it; {_legal(layout)}")
    elif num_nodes(layout, size) is None:
        whence = "" if parallel.node_size is not None else " (from the launcher)"
        yield Problem(
            key,
            f"{size}{whence} cuts the {layout.expert_ranks} ranks of an expert group (parallel.expert x "
            f"expert_tensor) unevenly; {_legal(layout)}, or set parallel.exchange=direct",
        )


def _fixed_share_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield where ranks could not know how many rows they send each other."""
    if not has_fixed_shares(config) or layout.expert_ranks == 1 or not moe_layer_numbers(config):
        return
    exchange = config.parallel.exchange.name
    if not get_part("exchange", exchange).knows_slots:
        yield Problem(
            "parallel.exchange",
            f"{exchange} does not send fixed shares (moe.router.capacity.pad); legal: auto, direct",
        )
    padded = _padded_by(config)
    if padded is not None:
        yield Problem(
            "moe.router.capacity.pad",
            f"the micro batches of {padded} have padding; legal with expert ranks: false",
        )


def _padded_by(config: RunConfig) -> str | None:
    """Return what gives micro batches padding, or None."""
    if config.model.architecture != "decoder":
        return f"an {config.model.architecture}"
    try:
        return f"the objective {config.train.objective.name}" if objective_class(config).pads else None
    except UserError:
        return None  # told of the objective itself


def _weight_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield where the experts would need the router's weights, and do not get them."""
    exchange = config.parallel.exchange.name
    if layout.expert_ranks == 1 or get_part("exchange", exchange).sends_weights:
        return
    for kind in kinds(config):
        if kind.layers and kind.moe.weights_in_activation:
            yield Problem(
                kind.place("moe.weights_in_activation"),
                f"true, but the exchange {exchange} does not send the weights to the experts; set it to "
                "false, or parallel.exchange to auto, direct or by_node",
            )


def _legal(layout: Layout) -> str:
    legal = [size for size in divisors(layout.ranks) if num_nodes(layout, size) is not None]
    return f"legal on {layout.ranks} ranks: {', '.join(map(str, legal))}"
