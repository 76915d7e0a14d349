"""Parameter groups: which parameters an entry of `optimizer.groups` names, and their weight decay."""

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

from megamoe.config.schema import GroupConfig, OptimizerConfig
from megamoe.config.values import compile_pattern
from megamoe.errors import UserError
from megamoe.parallel.consensus import CollectiveError

Parameter = TypeVar("Parameter")


def divide(
    named: Sequence[tuple[str, Parameter]], groups: Sequence[GroupConfig], elsewhere: Sequence[str] = ()
) -> list[list[Parameter]]:
    """Return the parameters of no group, then those of each group, in the order of `named`; the first match
    counts.

    named: (name, parameter) of the trained parameters of this pipeline stage. elsewhere: the names of those
    of the other stages, which may be the only ones that a pattern matches.

    Raises:
        CollectiveError: naming the pattern, if a group would have no parameter.
    """
    found: list[list[Parameter]] = [[] for _ in range(1 + len(groups))]
    matchers = [compile_pattern(group.pattern) for group in groups]
    matched = [False] * len(groups)
    used = [False] * (1 + len(groups))
    of_stage = dict(named)
    names = [*of_stage, *elsewhere]
    for name in names:
        numbers = [number for number, matches in enumerate(matchers) if matches(name)]
        for number in numbers:
            matched[number] = True
        place = numbers[0] + 1 if numbers else 0
        used[place] = True
        if name in of_stage:
            found[place].append(of_stage[name])
    for number, group in enumerate(groups):
        if not used[number + 1]:
            raise CollectiveError(_refusal(number, group, matched[number], names))
    return found


def _refusal(number: int, group: GroupConfig, matched: bool, names: list[str]) -> str:
    key = f"optimizer.groups.{number}.pattern: {group.pattern!r}"
    if matched:
        return f"{key}: all parameters that it matches belong to groups before it; move it up, or take it out"
    near = difflib.get_close_matches(group.pattern, names, n=3, cutoff=0)
    return f"{key} matches no trained parameter; expected a part of names such as {', '.join(near)}"


def weight_decay(config: OptimizerConfig) -> float:
    """Return the effective weight decay: the configured value, else 0.1 for AdamW and 0 for Adam."""
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.1 if config.name == "adamw" else 0.0


def decays(config: OptimizerConfig) -> bool:
    """Whether any parameter has a weight decay."""
    return weight_decay(config) != 0 or any(group.weight_decay for group in config.groups)


def check_adam(where: str, section: dict[str, Any], config: OptimizerConfig) -> None:
    """Refuse Adam's weight decay where DeepSpeed steps by an AdamW of its own making.

    where: the DeepSpeed file; section: its zero_optimization, whose keys are DeepSpeed's already.

    Raises:
        UserError: naming the file's key, what it does, and the way out.
    """
    offload = section.get("offload_optimizer") or {}
    if config.name == "adamw" or not decays(config):
        return
    for key, without in (("ratio", 1.0), ("super_offload", False)):
        if offload.get(key, without) != without:
            raise UserError(
                f"{where}: zero_optimization.offload_optimizer.{key} is {offload[key]!r}, with which "
                f"DeepSpeed takes AdamW for a part of the weights, but optimizer.name is {config.name} with "
                f"{_largest_decay(config)}; leave {key} out, or set optimizer.name: adamw"
            )


def _largest_decay(config: OptimizerConfig) -> str:
    if weight_decay(config):
        return f"weight_decay {weight_decay(config):g}"
    return (
        f"a weight_decay of {max(group.weight_decay or 0 for group in config.groups):g} in optimizer.groups"
    )
