"""YAML + dotted overrides -> RunConfig. Every mistake becomes one line that names the key."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from megamoe import registry
from megamoe.config.parts import PartChoice
from megamoe.config.schema import RunConfig
from megamoe.errors import UserError


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads 1e-4 as a number (YAML 1.2), which PyYAML takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> RunConfig:
    """Read a run's YAML, apply `section.key=value` overrides, load its plugins, check every key.

    Raises:
        UserError: for a file that cannot be read, an unknown key (the nearest is named), a wrong
            type or value, an unknown part, a plugin that fails.
    """
    tree: dict[str, Any] = {}
    base = None
    if path is not None:
        tree, base = _read_yaml(Path(path)), Path(path).parent
    for override in overrides or []:
        _apply_override(tree, override)
    plugins = tree.get("plugins") or []
    if not isinstance(plugins, list):
        raise UserError(f"plugins: expected a list of files or names, found {plugins!r}")
    for plugin in plugins:
        registry.load_plugin(str(plugin), base)
    return parse_config(tree, source=str(path) if path is not None else "configuration")


def parse_config(tree: dict[str, Any], source: str = "configuration") -> RunConfig:
    """Check a plain mapping against the schema; plugins must be loaded already."""
    try:
        # As JSON, because only there may a mapping become a dataclass while numbers stay strict.
        return TypeAdapter(RunConfig).validate_json(json.dumps(_without_shorthands(tree), default=str))
    except ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error)}") from None


def to_dict(config: Any) -> Any:
    """The resolved configuration as plain data, ready for YAML or JSON; `parse_config` reads it back."""
    if isinstance(config, PartChoice):
        return config.to_dict()
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return config


def dump_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML text."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def _without_shorthands(tree: dict[str, Any]) -> dict[str, Any]:
    """`layers: none` and bare paths as sources, written out."""
    tree = copy.deepcopy(tree)
    moe, data = tree.get("moe"), tree.get("data")
    if isinstance(moe, dict) and "layers" in moe and moe["layers"] in (None, "none"):
        moe["layers"] = {}
    if isinstance(data, dict):
        if "sources" in data:
            data["sources"] = _with_paths(data["sources"])
        if isinstance(data.get("validation"), dict):
            data["validation"] = {name: _with_paths(value) for name, value in data["validation"].items()}
    return tree


def _with_paths(sources: Any) -> Any:
    if isinstance(sources, str):
        sources = [sources]
    if not isinstance(sources, list):
        return sources
    return [{"path": source} if isinstance(source, str) else source for source in sources]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(f"--config: cannot read {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" line {place.line + 1}" if place is not None else ""
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise UserError(f"--config: {path}{where} is not valid YAML: {problem}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"--config: {path} must hold a mapping of sections, found a {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise UserError(f"override {override!r}: expected section.key=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: {text!r} is not a YAML value") from None
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.get(key)
        if isinstance(child, str) and _is_part_key(keys[: depth + 1]):
            child = {"name": child}
        elif isinstance(child, int | float) and keys[depth - 1] == "losses":
            child = {"weight": child}
        if child is None:
            child = {}
        if not isinstance(child, dict):
            raise UserError(
                f"override {override!r}: {'.'.join(keys[: depth + 1])} is {child!r}, not a section"
            )
        node[key] = child
        node = child
    node[keys[-1]] = value


def _is_part_key(keys: list[str]) -> bool:
    return keys[:2] == ["moe", "router"] and len(keys) == 3


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    # An unknown key is the likeliest cause of the others (a missing key, say): tell it first.
    problem = next((p for p in problems if p["type"] == "unexpected_keyword_argument"), problems[0])
    location = [str(step) for step in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "unexpected_keyword_argument":
        section = ".".join(location[:-1])
        message = registry.unknown_name_message("key", location[-1], _known_keys(location[:-1]))
        return f"{section}: {message}" if section else message
    if problem["type"] == "part":
        return f"{key}: {problem['msg']}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key}: this key is required"
    expected = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{key}: found {problem['input']!r}; {expected}"


def _known_keys(location: list[str]) -> list[str]:
    """The keys of the section at `location`; descends the schema's dataclasses."""
    node: Any = RunConfig
    for step in location:
        hints = get_type_hints(node) if dataclasses.is_dataclass(node) else {}
        if step in hints:  # otherwise a place in a list, or a name that the user gave
            node = _inner_dataclass(hints[step]) or node
    return [f.name for f in dataclasses.fields(node)]


def _inner_dataclass(hint: Any) -> Any:
    """The dataclass inside `Sources`, `dict[str, Sources]`, `X | None` and the like."""
    if dataclasses.is_dataclass(hint):
        return hint
    for argument in getattr(hint, "__args__", ()):
        found = _inner_dataclass(argument)
        if found is not None:
            return found
    return None
