"""Which dispatch a layer gets, and on how many nodes a token's experts lie."""

from megamoe.config import PartChoice
from megamoe.config.schema import MoEConfig
from megamoe.moe.dispatch.dispatcher import DispatchConfig, Dispatcher, LocalDispatch
from megamoe.moe.process_groups import size_of
from megamoe.registry import get_part


def build_dispatcher(choice: PartChoice, settings: DispatchConfig) -> Dispatcher:
    """Return a layer's dispatch; on a rank that holds all experts whole it sends nothing."""
    groups = settings.groups
    if size_of(groups.expert) == size_of(groups.expert_tensor) == 1:
        return LocalDispatch(None, settings)
    return get_part("exchange", choice.name).build(choice.options, settings)


def mean_nodes(moe: MoEConfig, nodes: int, choices: float) -> float:
    """Return on how many of `nodes` nodes a token's experts lie, on average over equally likely choices.

    choices: a token's experts. Masks that limit a token's groups of experts thereby limit its nodes.
    """
    experts, reached = float(moe.num_experts), float(nodes)
    for mask in moe.router.masks:
        limit = get_part("mask", mask.name).group_limit(mask.options)
        if limit is not None:
            groups, keep = limit
            reached = keep * nodes / groups if nodes >= groups else _distinct(groups, nodes, keep)
            experts = experts * keep / groups
    return min(_distinct(experts, reached, choices), choices)


def _distinct(items: float, boxes: float, drawn: float) -> float:
    """Return how many boxes, which the items fill evenly, have one of the drawn items, on average."""
    missed, left = 1.0, drawn
    while left > 0:
        remaining = items - (drawn - left)
        if remaining <= items / boxes:
            return boxes
        part = min(left, 1.0)
        missed *= (1.0 - items / boxes / remaining) ** part
        left -= part
    return boxes * (1.0 - missed)
