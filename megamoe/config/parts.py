"""Parts in the configuration: `top_k`, or `{name: top_k, k: 2}`, checked against the part's Config."""

import dataclasses
import functools
import json
from typing import Any

from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from megamoe import registry
from megamoe.config.messages import shown
from megamoe.errors import UserError

DEFAULTS = {
    "scorer": "linear",
    "residual": "none",
    "score_function": "softmax",
    "selector": "top_k",
    "capacity": "none",
    "objective": "causal",
    "exchange": "auto",
}
LARGEST_INT, LARGEST_FLOAT, SMALLEST_FLOAT = 10**9, 10**6, 1e-12
STRICT = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


class Section:
    """A section of the configuration, a dataclass: unknown keys, and values of another type, are refused."""

    __pydantic_config__ = STRICT


@dataclasses.dataclass(frozen=True)
class PartChoice:
    """A part chosen by name, with its checked options (an instance of the part's `Config`)."""

    kind: str
    name: str
    options: Any

    @classmethod
    def default(cls, kind: str, name: str | None = None) -> "PartChoice":
        """Return this part, or the kind's default part, with the defaults of its Config."""
        name = name or DEFAULTS[kind]
        return cls(kind, name, registry.get_part(kind, name).Config())

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as it would be in YAML."""
        return {"name": self.name, **dataclasses.asdict(self.options)}


def part_validator(kind: str) -> PlainValidator:
    """Return the validator of a key that holds a part; options without a name are the default part's."""

    def validate(value: Any) -> PartChoice:
        if value is None:  # in YAML, `none` may mean the part or null
            value = "none"
        options = dict(value) if isinstance(value, dict) else {"name": value}
        name = options.pop("name", DEFAULTS.get(kind))
        if not isinstance(name, str):
            raise _problem(
                f"expected the name of a {registry.label(kind)}, or `{{name: ...}}`, found {shown(value)}"
            )
        return PartChoice(kind, name, _build_options(kind, name, options))

    return PlainValidator(validate)


def none_means_empty(parts: Any) -> Any:
    """Turn `none` into [] for a key that holds a list of parts."""
    return [] if parts == "none" else parts


def single_size(size: Any) -> Any:
    """Refuse a list of sizes: the experts of a layer are stacked, so they have one size."""
    if isinstance(size, list):
        raise _problem(
            f"found {shown(size)}, but all experts of a layer have one size; give one whole number. For "
            "experts of several sizes take the smallest and more of them (moe.num_experts), of which a token "
            "chooses several (moe.router.selector), or shared ones (moe.num_shared_experts)"
        )
    return size


def normalise_losses(losses: Any) -> Any:
    """Turn `{z_loss: 0.1}` and `{z_loss: {weight: 0.1}}` into `{z_loss: {name: z_loss, weight: 0.1}}`.

    With an explicit name, the key is free: a loss is logged under its key, and one part may be used twice.
    """
    if losses in (None, "none"):
        return {}
    if not isinstance(losses, dict):
        return losses
    for key, value in losses.items():
        if not registry.is_name(key) or key in registry.RESERVED_LOSS_NAMES:
            raise _problem(f"a loss is logged as train/<its key>: {shown(key)} is no name for one")
        name = value.get("name", key) if isinstance(value, dict) else key
        if name != key and key in registry.list_parts("loss"):
            raise _problem(f"{key!r} is itself a loss, but its name says {shown(name)}; choose another key")
    return {name: {"name": name, **loss_options(value)} for name, value in losses.items()}


def loss_options(value: Any) -> dict[str, Any]:
    """Return the options of a loss, of which a number alone is the weight."""
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"weight": value}


def _build_options(kind: str, name: str, options: dict[str, Any]) -> Any:
    try:
        config_class = registry.get_part(kind, name).Config
    except UserError as error:
        near = registry.nearest(name, list(registry.list_parts(kind)))
        raise _problem(
            str(error) if near else f"{error}; one of your own needs its file in plugins"
        ) from None
    if config_class is registry.NamedPart.Config:
        return options
    known = [field.name for field in dataclasses.fields(config_class)]
    for key in options:
        if key not in known:
            raise _problem(
                f"the {registry.label(kind)} {name!r} has no option {key!r}"
                f"{registry.nearest_and_all(key, known)}"
            )
    try:
        checked = _adapter(config_class).validate_json(json.dumps(options))
    except ValidationError:
        raise
    except Exception as error:  # a type that cannot be checked, or an error of its __post_init__
        part = registry.get_part(kind, name)
        if registry.is_ours(part):
            raise
        raise _problem(
            f"the Config of the {registry.label(kind)} {name!r} failed{registry.failure_of(part, error)}"
        ) from error
    if registry.is_ours(config_class):
        _check_bounds(kind, name, checked)
    return checked


@functools.lru_cache(maxsize=1024)
def _adapter(config_class: type) -> TypeAdapter[Any]:
    """Return what checks options against this Config. To build it takes milliseconds, each time again."""
    if "__pydantic_config__" not in vars(config_class):
        config_class.__pydantic_config__ = STRICT  # type: ignore[attr-defined]  # a plugin's, as strict as ours
    adapter: TypeAdapter[Any] = TypeAdapter(config_class)
    adapter.rebuild()  # names a type that it does not find; validation would not
    return adapter


def _check_bounds(kind: str, name: str, options: Any) -> None:
    """Refuse numbers in our own parts' options that fp32 or int64 cannot hold."""
    for key, value in dataclasses.asdict(options).items():
        problem = None
        if type(value) is int and abs(value) > LARGEST_INT:
            problem = f"a whole number of at most {LARGEST_INT:,}"
        elif type(value) is float and abs(value) > LARGEST_FLOAT:
            problem = f"a number of at most {LARGEST_FLOAT:,}"
        elif type(value) is float and 0 < abs(value) < SMALLEST_FLOAT:
            problem = f"0, or a number of at least {SMALLEST_FLOAT}"
        if problem is not None:
            raise _problem(f"the {kind} {name!r}: {key}: expected {problem}, found {shown(value)}")


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("part", "{message}", {"message": message})
