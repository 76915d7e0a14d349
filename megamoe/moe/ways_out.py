"""What parts declare, and which registered parts and options have a capability: the end of a message."""

import dataclasses
import json
import typing
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

from megamoe.config import PartChoice
from megamoe.config.parts import DEFAULTS
from megamoe.moe.part import CAPABILITIES, Part
from megamoe.registry import KINDS, get_part, list_parts

SMALL = (16, 2)  # experts, choices of a token

Fits = Callable[[PartChoice], bool]


def capabilities(choice: PartChoice) -> set[str]:
    """What a part provides with its options; every mask provides `mask`."""
    provided: set[str] = get_part(choice.kind, choice.name).provides(choice.options)
    return provided | {choice.kind} if choice.kind == "mask" else provided


def requirements(choice: PartChoice) -> dict[str, str]:
    """What a part requires with its options: capability -> why."""
    found: dict[str, str] = get_part(choice.kind, choice.name).requires(choice.options)
    return found


def provides(word: str, choice: PartChoice) -> bool:
    """Whether a part has this capability."""
    return word in capabilities(choice)


def needs(word: str, kind: str, choice: PartChoice) -> bool:
    """Whether it is a part of this kind that requires this capability of another."""
    return choice.kind == kind and word in requirements(choice)


def phrase(word: str) -> str:
    """A capability as the end of a sentence that begins with the part."""
    return CAPABILITIES.get(word, f"gives {word}" if word[-1:].isupper() else f"provides {word}")


def parts_that(fits: Fits, sizes: tuple[int, int] | None = None) -> list[PartChoice]:
    """Every registered part that fits, each with the first options with which it does.

    They are its defaults, then those of its examples in a small layer; with `sizes`, experts and choices of
    a token, first those of its examples in such a layer.
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


def named(choices: list[PartChoice]) -> str:
    """The parts as the YAML would name them: `noisy or {name: hierarchical, noisy: true}`."""
    return " or ".join(_yaml(choice) for choice in choices)


def _yaml(choice: PartChoice) -> str:
    """Only options that are not the defaults."""
    own = [
        f"{field.name}: {_value(value)}"
        for field in dataclasses.fields(choice.options)
        if (value := getattr(choice.options, field.name)) != field.default
    ]
    return f"{{name: {', '.join([choice.name, *own])}}}" if own else choice.name


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def another_option(choice: PartChoice, fits: Fits) -> str | None:
    """`selector.weights: raw`: the first other value of one option with which the part fits."""
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


def without(choice: PartChoice, word: str) -> str:
    """How a layer gets rid of a capability that this part of it provides."""

    def fits(other: PartChoice) -> bool:
        return word not in capabilities(other)

    changed = another_option(choice, fits)
    if changed is not None:
        return f"set {changed}"
    if choice.kind not in DEFAULTS:
        return f"leave the {choice.kind} out"
    others = [other for other in parts_that(fits) if other.kind == choice.kind]
    default = [other for other in others if other.name == DEFAULTS[choice.kind]]
    return f"set {choice.kind}: {named(default or others)}"
