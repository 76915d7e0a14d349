"""Reads YAML, presets and dotted overrides into a RunConfig. Every error is one line that names the key."""

import copy
import dataclasses
import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megamoe import object_storage, registry
from megamoe.config.files import as_mapping, read_run
from megamoe.config.messages import problems_of, shown
from megamoe.config.parts import DEFAULTS, PartChoice, loss_options
from megamoe.config.schema import RunConfig
from megamoe.config.yaml_text import DEEPEST, dump, parse_yaml, problem_of
from megamoe.errors import ConfigError, UserError

FIRST_OR_LAST = re.compile(r"(first|last) ([1-9]\d{0,3})")  # layers of a group


class Dropped(str):
    """The value `none` of a loss under any name."""


def expand_preset(moe: dict[str, Any]) -> dict[str, Any]:
    """Return the section `moe` with its preset, if it names one, written out.

    Raises:
        UserError: for an unknown preset, or an unknown loss that is `none`; the message names the nearest.
    """
    moe = _without_dropped_losses(_over_preset(moe))
    if isinstance(moe.get("groups"), list):
        moe["groups"] = [_group_over(moe, group, place) for place, group in enumerate(moe["groups"])]
    return moe


def _group_over(moe: dict[str, Any], group: Any, place: int) -> Any:
    """Return a group with all of its keys: those of `moe` that it does not have, and stages of the router.

    A group that names a preset takes neither the router nor the losses of `moe`, but those of the preset.
    """
    key = f"moe.groups[{place}]"
    if not isinstance(group, dict):
        raise UserError(f"{key}: expected a mapping of keys of moe with layers, found {shown(group)}")
    if "layers" not in group:
        raise UserError(f"{key}: has no layers; say which, such as layers: [1, 2] or layers: first 2")
    if len(group) == 1:
        raise UserError(f"{key}: replaces nothing; give a key of moe beside layers, or leave the group out")
    router = group.get("router")
    try:
        own = _over_preset(group)
        if own.pop("groups", None) or "groups" in group:
            raise UserError("moe.router: a group can have no groups, nor a preset that has some")
        own = _without_dropped_losses(own)
    except UserError as error:
        raise UserError(str(error).replace("moe.", f"{key}.", 1)) from None
    base = {name: value for name, value in moe.items() if name not in ("layers", "groups")}
    is_preset = isinstance(router, str) or (isinstance(router, dict) and "preset" in router)
    if is_preset:
        own = {"losses": {}, **own}
    elif isinstance(router, dict) and isinstance(base.get("router", {}), dict):
        own["router"] = _merge_router(base.get("router", {}), router)
    if isinstance(own.get("router"), dict):
        if isinstance(router, dict) and router.get("replay") is not None:
            raise UserError(f"{key}.router.replay: a record is of the whole model; set moe.router.replay")
        own["router"] = {**own["router"], "replay": None}
    return {**base, **own, "layers": _written_out_layers(group["layers"])}


def _written_out_layers(layers: Any) -> Any:
    """Return a group's `layers` as a mapping; what is none of its forms as it stands."""
    if isinstance(layers, list):
        return {"at": layers}
    if isinstance(layers, str) and (found := FIRST_OR_LAST.fullmatch(layers)):
        return {found[1]: int(found[2])}
    if isinstance(layers, dict):
        return {
            name: _written_out_layers(value) if name in ("encoder", "decoder") else value
            for name, value in layers.items()
        }
    return layers


def _over_preset(moe: dict[str, Any]) -> dict[str, Any]:
    moe = dict(moe)
    router = moe.get("router")
    if isinstance(router, str):
        router = {"preset": router}
    if not isinstance(router, dict) or "preset" not in router:
        return moe
    router = dict(router)
    base = _over_preset(copy.deepcopy(_tree_of(router.pop("preset"))))
    moe["router"] = _merge_router(base.get("router", {}), router)
    losses = {} if moe.get("losses") is None else moe["losses"]
    if isinstance(losses, dict):
        base_losses = base.get("losses", {})
        moe["losses"] = _merge_losses({} if base_losses == "none" else base_losses, losses)
    return {**base, **moe}


def _tree_of(preset: Any) -> dict[str, Any]:
    if not isinstance(preset, str):
        raise UserError(
            f"moe.router.preset: expected the name of a preset, found {shown(preset)}; options of its parts "
            "stand beside it, as in moe.router.selector.k=2"
        )
    try:
        return registry.get_preset(preset).tree
    except UserError as error:
        raise UserError(f"moe.router: {error}") from None


def _merge_router(base: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **mine}
    for stage in registry.STAGES:
        if stage in base and stage in mine:
            merged[stage] = _merge_part(base[stage], mine[stage], DEFAULTS[stage])
    return merged


def _merge_part(base: Any, mine: Any, default: str) -> Any:
    base = {"name": default, **base} if isinstance(base, dict) else {"name": base}
    if isinstance(mine, dict) and mine.get("name", base["name"]) == base["name"]:
        return {**base, **mine}
    return base if mine == base["name"] else mine


def _merge_losses(base: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {**base, **mine}
    for name in base.keys() & mine.keys():
        before, options = loss_options(base[name]), loss_options(mine[name])
        if mine[name] is None:
            merged[name] = base[name]
        elif mine[name] == "none":
            merged[name] = Dropped("none")
        else:
            known = before.get("name", name)
            merged[name] = {**before, **options} if options.get("name", known) == known else options
    return merged


def _without_dropped_losses(moe: dict[str, Any]) -> dict[str, Any]:
    losses = moe.get("losses")
    if not isinstance(losses, dict):
        return moe
    known = [*registry.list_parts("loss"), *(name for name, value in losses.items() if value != "none")]
    for name, value in losses.items():
        if value == "none" and name not in known and not isinstance(value, Dropped):
            raise UserError(f"moe.losses: {registry.unknown_name_message('loss', name, known)}")
    return {**moe, "losses": {name: value for name, value in losses.items() if value != "none"}}


# Keys that are gone with their defaults, which the resolved YAML of earlier runs and checkpoints has.
GONE: dict[str, dict[str, Any]] = {
    "log": {
        "noise_scale_every": 0,
        "attention_logits_every": 0,
        "gradient_shares_every": 0,
        "heat_map_every": 100,
    },
    "optimizer": {"qk_clip": None},
}
_RUN = TypeAdapter(RunConfig)
ENDING = ".idx"  # of a prepared dataset
COMMAND_LINE = "command line"


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> RunConfig:
    """Read a run's YAML with its bases (`files.py`), apply `section.key=value` overrides, load its plugins,
    and check every key.

    Raises:
        UserError: for a file that cannot be read, an unknown key (the message names the nearest), a wrong
            type or value, an unknown part, or a plugin that fails.
    """
    tree = read_run(Path(path)) if path is not None else {}
    return configure(tree, overrides or [], str(path) if path is not None else "configuration")


def configure(tree: dict[str, Any], overrides: list[str], source: str = "configuration") -> RunConfig:
    """Apply overrides to a plain mapping, load the plugins that it names, and check it against the schema.

    Overrides change the mapping. Relative files of plugins are searched in the working directory.

    Raises:
        UserError: as `load_config`.
    """
    for override in overrides:
        apply_override(tree, override)
    plugins = tree.get("plugins") or []
    if not isinstance(plugins, list):
        raise UserError(f"plugins: expected a list of files or names, found {shown(plugins)}")
    if plugins:
        tree = {**tree, "plugins": [registry.load_plugin(str(plugin)) for plugin in plugins]}
    return parse_config(tree, source, overrides)


def parse_config(
    tree: dict[str, Any], source: str = "configuration", overrides: Sequence[str] = ()
) -> RunConfig:
    """Check a plain mapping against the schema; plugins must already be loaded.

    source: what the messages name. overrides: those that were applied; messages about them name COMMAND_LINE.

    Raises:
        ConfigError: with all problems, if the mapping does not fit the schema.
    """
    try:
        # As JSON: in strict mode pydantic turns a mapping into a dataclass only when it reads JSON.
        return _RUN.validate_json(json.dumps(_without_shorthands(tree)))
    except ValidationError as error:
        problems = problems_of(error, RunConfig)
    except UserError as error:
        problems = [str(error)]
    at_fault = (COMMAND_LINE if _is_of_override(it, overrides) else source for it in problems)
    raise ConfigError(*map("{}: {}".format, at_fault, problems))


def _is_of_override(problem: str, overrides: Sequence[str]) -> bool:
    """Whether an override set the key of a problem, or a key in it that is unknown there."""
    key = problem.partition(": ")[0]
    for override in overrides:
        dotted = override.partition("=")[0]
        section, _, last = dotted.rpartition(".")
        unknown = section == key and any(f"{it} {last!r}" in problem for it in ("unknown key", "no option"))
        unknown |= problem.startswith(f"unknown key {dotted.partition('.')[0]!r}")
        if unknown or f"{key}.".startswith(f"{dotted}."):
            return True
    return False


def to_dict(config: Any) -> Any:
    """Return the resolved configuration as plain data for YAML or JSON; `parse_config` reads it."""
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
    """Return the resolved configuration as YAML text."""
    return dump(to_dict(config))


def _without_shorthands(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with presets, `layers: none`, bare source paths and patterns of paths written out."""
    tree = copy.deepcopy(tree)
    for section, defaults in GONE.items():
        if isinstance(held := tree.get(section), dict):
            gone = {key for key, default in defaults.items() if held.get(key) in (default, 0, None)}
            tree[section] = {key: value for key, value in held.items() if key not in gone}
    moe, data = tree.get("moe"), tree.get("data")
    if isinstance(moe, dict):
        moe = tree["moe"] = expand_preset(moe)
        if "layers" in moe and moe["layers"] in (None, "none"):
            moe["layers"] = {}
    if isinstance(data, dict):
        if "sources" in data:
            data["sources"] = _with_paths(data["sources"], "data.sources")
        if isinstance(data.get("validation"), dict):
            data["validation"] = {
                name: _with_paths(value, f"data.validation.{name}")
                for name, value in data["validation"].items()
            }
    return tree


def _with_paths(sources: Any, key: str) -> Any:
    if isinstance(sources, str):
        sources = [sources]
    if not isinstance(sources, list):
        return sources
    written_out: list[Any] = []
    for source in sources:
        mapping = {"path": source} if isinstance(source, str) else source
        if isinstance(mapping, dict) and isinstance(path := mapping.get("path"), str):
            written_out += [{**mapping, "path": each} for each in _datasets_of(path, key)]
        else:
            written_out.append(source)
    return written_out


def _datasets_of(path: str, key: str) -> list[str]:
    """Return the prepared datasets that a path with `*` names, sorted; another path as it stands.

    `.bin` or `.idx` at its end, and `~` at its start, are what a shell would complete or expand.
    """
    path = os.path.expanduser(path.removesuffix(".bin").removesuffix(ENDING))
    if "*" not in path:
        return [path]
    found = sorted(name.removesuffix(ENDING) for name in _matches(path + ENDING, key))
    if not found:
        raise UserError(f"{key}: {path!r} names no prepared dataset: there is no file {path + ENDING!r}")
    return found


def _matches(pattern: str, key: str) -> list[str]:
    """Return the files, or the objects behind a URL, that a pattern names."""
    if not object_storage.is_url(pattern):
        return glob.glob(pattern)
    name = object_storage.without_credentials(pattern)
    if object_storage.has_credentials(pattern):
        raise UserError(f"{key}: {name!r} holds credentials; give them by the environment")
    try:
        system, path = object_storage.open_system(pattern)
        names = object_storage.attempt(lambda: system.glob(path), object_storage.WAITS_S)
        return [str(system.unstrip_protocol(name)) for name in names]
    except (ImportError, ValueError, object_storage.RemoteError) as error:
        why = object_storage.reason_of(error)
        raise UserError(f"{key}: {name!r} cannot be reached: {why}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set a key of a mapping by `section.key=value`.

    Raises:
        UserError: if it has another form, or its value is no YAML.
    """
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys) or len(keys) > DEEPEST or not dotted.isprintable():
        raise UserError(f"override {shown(override)}: expected section.key=value, such as optimizer.lr=1e-4")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"override {shown(override)}: {shown(text)} is no YAML value ({problem_of(error)[1]}); quote it"
        ) from None
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.get(key)
        if isinstance(child, str) and keys[: depth + 1] == ["moe", "router", "preset"]:
            raise UserError(
                f"override {override!r}: moe.router.preset is {shown(child)}, which has no keys; options of "
                f"its parts stand beside it: moe.router.{dotted.split('.', 3)[3]}={text}"
            )
        child = as_mapping(child, keys[: depth + 1])
        if not isinstance(child, dict):
            raise UserError(
                f"override {override!r}: {'.'.join(keys[: depth + 1])} is {shown(child)}, which has no keys; "
                "set it whole"
            )
        node[key] = child
        node = child
    known_loss = keys[:-1] == ["moe", "losses"] and keys[-1] in node
    node[keys[-1]] = Dropped("none") if known_loss and value == "none" else value
