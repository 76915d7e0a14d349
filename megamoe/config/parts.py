"""Parts in the configuration: `top_k`, or `{name: top_k, k: 2}`, checked against the part's own Config."""

import dataclasses
import json
from typing import Any

from pydantic import ConfigDict, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from megamoe import registry
from megamoe.errors import UserError


@dataclasses.dataclass(frozen=True)
class PartChoice:
    """A part chosen by name, with its checked options.

    `options` is an instance of the part's `Config` dataclass.
    """

    kind: str
    name: str
    options: Any

    @classmethod
    def default(cls, kind: str, name: str) -> "PartChoice":
        """The part with the defaults of its Config."""
        return cls(kind, name, registry.get_part(kind, name).Config())

    def to_dict(self) -> dict[str, Any]:
        """What the YAML would say."""
        return {"name": self.name, **dataclasses.asdict(self.options)}


def single_part(kind: str, default: str) -> PlainValidator:
    """Validator of a key that holds one part; options without a name belong to the default part."""

    def validate(value: Any) -> PartChoice:
        return _build_part(kind, *_split_name(kind, value, default))

    return PlainValidator(validate)


def parts_in_order(kind: str) -> PlainValidator:
    """Validator of a list of parts, applied one after the other."""

    def validate(value: Any) -> list[PartChoice]:
        if not isinstance(value, list):
            raise PydanticCustomError("part", f"expected a list of {kind}s")
        return [_build_part(kind, *_split_name(kind, item, "")) for item in value]

    return PlainValidator(validate)


def parts_by_name(kind: str) -> PlainValidator:
    """Validator of a mapping name -> options; a bare number is the part's `weight`."""

    def validate(value: Any) -> dict[str, PartChoice]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise PydanticCustomError("part", "expected a mapping of names to options")
        parts = {}
        for name, options in value.items():
            if isinstance(options, int | float) and not isinstance(options, bool):
                options = {"weight": options}
            options = dict(options or {})
            options.pop("name", None)  # the resolved configuration spells it out
            parts[name] = _build_part(kind, name, options)
        return parts

    return PlainValidator(validate)


def _split_name(kind: str, value: Any, default: str) -> tuple[str, dict[str, Any]]:
    if value is None:  # YAML spells `none` the part and null alike
        return "none", {}
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        options = dict(value)
        return options.pop("name", default), options
    raise PydanticCustomError("part", f"expected the name of a {kind}, or a mapping with `name` and options")


def _build_part(kind: str, name: str, options: dict[str, Any]) -> PartChoice:
    try:
        config_class = registry.get_part(kind, name).Config
    except UserError as error:
        raise PydanticCustomError("part", "{message}", {"message": str(error)}) from error
    known = [field.name for field in dataclasses.fields(config_class)]
    for key in options:
        if key not in known:
            message = registry.unknown_name_message(f"option of the {kind} {name!r}:", key, known)
            raise PydanticCustomError("part", "{message}", {"message": message})
    adapter = TypeAdapter(_strict(config_class))
    return PartChoice(kind, name, adapter.validate_json(json.dumps(options)))


def _strict(config_class: type) -> type:
    """Plugins need not know pydantic: their plain dataclass is made as strict as ours."""
    if "__pydantic_config__" not in vars(config_class):
        config_class.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    return config_class
