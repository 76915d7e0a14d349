"""Parameter groups: which parameters an entry of `optimizer.groups` names, and their weight decay."""

import difflib
from collections.abc import Sequence
from typing import TypeVar

from megamoe.config.schema import GroupConfig, OptimizerConfig
from megamoe.config.values import compile_pattern
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
    """Return the effective weight decay: the configured value, else 0 for Adam and 0.1 for the others."""
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.0 if config.name == "adam" else 0.1


def decays(config: OptimizerConfig) -> bool:
    """Whether any parameter has a weight decay."""
    return weight_decay(config) != 0 or any(group.weight_decay for group in config.groups)
