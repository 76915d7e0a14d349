"""Which registered parts have a capability, and how to remove one; used to end error messages."""

import dataclasses
import json
import typing
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

from megamoe.config import PartChoice
from megamoe.config.parts import DEFAULTS
from megamoe.moe.capabilities import capabilities
from megamoe.moe.part import Part
from megamoe.registry import KINDS, get_part, list_parts

SMALL = (16, 2)  # experts, choices of a token

Fits = Callable[[PartChoice], bool]


def find_parts(fits: Fits, sizes: tuple[int, int] | None = None) -> list[PartChoice]:
    """Return every registered part that fits, each with the first options with which it fits.

    It tries the defaults, then the part's examples in a small layer. With `sizes` (experts, choices of a
    token) it tries the examples in such a layer first.
    """
    found: list[PartChoice] = []
    part: Any
    for kind in KINDS:
        for name, part in list_parts(kind).items():
            if issubclass(part, Part):
                found += [choice for choice in _variants(kind, name, part, sizes) if fits(choice)][:1]
    return found


@cache
def _variants(kind: str, name: str, part: Hashable, sizes: tuple[int, int] | None) -> tuple[PartChoice, ...]:
    part_class: Any = part
    examples = [example.options for example in part_class.examples(*(sizes or SMALL))]
    return tuple(_built(kind, name, part_class, [{}, *examples] if sizes is None else [*examples, {}]))


def _built(kind: str, name: str, part: Any, several: list[dict[str, Any]]) -> Iterator[PartChoice]:
    for options in several:
        try:
            yield PartChoice(kind, name, part.Config(**options))
        except (TypeError, ValueError):  # an option without a default, or not of these values
            continue


def to_yaml(choices: list[PartChoice]) -> str:
    """Return the parts as YAML would name them: `noisy or {name: hierarchical, noisy: true}`."""
    return " or ".join(_yaml(choice) for choice in choices)


def _yaml(choice: PartChoice) -> str:
    """Return the part's name with the options that differ from the defaults."""
    own = [
        f"{field.name}: {_value(value)}"
        for field in dataclasses.fields(choice.options)
        if (value := getattr(choice.options, field.name)) != field.default
    ]
    return f"{{name: {', '.join([choice.name, *own])}}}" if own else choice.name


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def another_option(choice: PartChoice, fits: Fits) -> str | None:
    """Return the first change of one option with which the part fits, such as `selector.weights: raw`."""
    part = get_part(choice.kind, choice.name)
    examples = _variants(choice.kind, choice.name, part, None)
    for field in dataclasses.fields(choice.options):
        values = [getattr(example.options, field.name) for example in examples]
        for value in (*values, *typing.get_args(field.type)):
            try:
                changed = dataclasses.replace(choice.options, **{field.name: value})
            except (TypeError, ValueError):
                continue
            if not isinstance(value, type) and fits(dataclasses.replace(choice, options=changed)):
                return f"{choice.kind}.{field.name}: {_value(value)}"
    return None


def how_to_remove(choice: PartChoice, capability: str) -> str:
    """Return how to remove a capability that this part provides."""

    def fits(other: PartChoice) -> bool:
        return capability not in capabilities(other)

    changed = another_option(choice, fits)
    if changed is not None:
        return f"set {changed}"
    if choice.kind not in DEFAULTS:
        return f"leave the {choice.kind} out"
    others = [other for other in find_parts(fits) if other.kind == choice.kind]
    default = [other for other in others if other.name == DEFAULTS[choice.kind]]
    return f"set {choice.kind}: {to_yaml(default or others)}"
