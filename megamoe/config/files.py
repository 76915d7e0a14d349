"""A run's YAML with the files that it builds on.

    base: x_moe.yaml               # or a list, of which a later file goes over an earlier one
    name: x_moe_sigmoid
    moe:
      router: {score_function: sigmoid}

Paths of bases are relative to the file that names them; files of plugins are searched there first. Mappings
are merged key by key, `differences` are added to those of the base, and every other value replaces that of
the base. Three things are replaced whole:
`moe.layers`, a list, and a part or preset whose `name` or `preset` the file gives anew. A part without a name
is the default one of its stage.
"""

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megamoe import registry
from megamoe.config.messages import shown
from megamoe.config.parts import DEFAULTS
from megamoe.config.yaml_text import parse_yaml, problem_of
from megamoe.errors import UserError
from megamoe.io import read_plain, real, reason

LARGEST_FILE = 1 << 20  # bytes of YAML
MOST_FILES = 20  # of one run


def read_run(path: Path, option: str = "--config") -> dict[str, Any]:
    """Return the mapping of a run's YAML, merged over its bases; the key `base` is gone.

    option: what named the file, the beginning of a message.

    Raises:
        UserError: for a file that cannot be read or is no mapping, a base that is no path, a file that is its
            own base, or more than 20 files.
    """
    return _read(path, [], [0], option)


def _read(path: Path, above: list[Path], count: list[int], option: str) -> dict[str, Any]:
    """Return a file merged over its bases; above: the files that build on it; count: [files read so far]."""
    place = real(path)
    if place in above:
        raise UserError(f"{option}: {above[-1]}: base: {path} is based on this file itself; leave it out")
    count[0] += 1
    if count[0] > MOST_FILES:
        raise UserError(f"{option}: {path}: more than {MOST_FILES} files of bases; merge some of them")
    tree = read_mapping(path, f"{option}: {above[-1]}: base" if above else option)
    tree = plugins_beside(path.parent, tree)
    bases = tree.pop("base", None)
    if bases is None:
        return tree
    merged: dict[str, Any] = {}
    for name in bases if isinstance(bases, list) else [bases]:
        if not isinstance(name, str) or not name:
            raise UserError(f"{option}: {path}: base: expected a file or a list of them, found {shown(name)}")
        merged = merge(merged, _read(path.parent / name, [*above, place], count, option))
    return merge(merged, tree)


def plugins_beside(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping of a YAML in `folder`, with `registry.configured_path` of its plugins there."""
    plugins = tree.get("plugins")
    if not isinstance(plugins, list):
        return tree
    return {**tree, "plugins": [_beside(folder, plugin) for plugin in plugins]}


def _beside(folder: Path, plugin: Any) -> Any:
    if isinstance(plugin, str) and plugin.endswith(".py"):
        with suppress(OSError):  # a name that is too long
            if (folder / plugin).is_file():
                return registry.configured_path(folder / plugin)
    return plugin


def read_mapping(path: Path, where: str) -> dict[str, Any]:
    """Return the mapping of a YAML file; where: the option that named it, the beginning of a message.

    Raises:
        UserError: if it cannot be read, or is no mapping.
    """
    try:
        tree = parse_yaml(read_plain(path, LARGEST_FILE).decode("utf-8"))
    except yaml.YAMLError as error:
        place, problem = problem_of(error)
        raise UserError(f"{where}: {path}{place} is not valid YAML: {problem}") from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: {path} is not valid YAML: not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot read {str(path)!r}: {reason(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{where}: {path}: expected a mapping of sections, found {shown(tree)}")
    return tree


def merge(base: dict[str, Any], mine: dict[str, Any], keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return `mine` over `base`, without changing either. keys: where both stand in the run's mapping."""
    merged = copy.deepcopy(base)
    for key, value in mine.items():
        place = [*keys, str(key)]
        before = as_mapping(merged.get(key), place)
        if (
            isinstance(before, dict)
            and isinstance(value, dict)
            and not _replaces(before, value, place, merged)
        ):
            merged[key] = merge(before, value, tuple(place))
        elif place == ["differences"] and isinstance(before, list) and isinstance(value, list):
            merged[key] = [*before, *(text for text in value if text not in before)]
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _replaces(
    before: dict[str, Any], value: dict[str, Any], place: list[str], section: dict[str, Any]
) -> bool:
    """Whether a mapping is another part than the one before it, or one that is never merged.

    section: the mapping in which the one before stands.
    """
    if place == ["moe", "router"]:
        return "preset" in value and value["preset"] != before.get("preset")
    if is_part_key(place):
        return "name" in value and value["name"] != before.get("name", _default_name(section, place[-1]))
    if place[:2] == ["moe", "losses"] and len(place) == 3:
        return "name" in value and value["name"] != before.get("name", place[-1])
    return place == ["moe", "layers"]


def _default_name(section: dict[str, Any], stage: str) -> str | None:
    """Return the part that options without a name are of: the preset's, or the default one.

    None: not known, as the preset is of a plugin, which is loaded later.
    """
    preset = section.get("preset")
    if preset is None:
        return DEFAULTS.get(stage)
    if not isinstance(preset, str) or preset not in registry.list_presets():
        return None
    router = as_mapping(registry.get_preset(preset).tree.get("router"), ["moe", "router"])
    part: dict[str, Any] = as_mapping(router.get(stage), ["moe", "router", stage])
    return part.get("name") or _default_name(router, stage)


def as_mapping(value: Any, keys: list[str]) -> Any:
    """Return the mapping for which a shorthand at this key stands; another value as it is."""
    if isinstance(value, str) and keys == ["moe", "router"]:
        return {"preset": value}
    if isinstance(value, str) and is_part_key(keys):
        return {"name": value}
    if isinstance(value, int | float) and keys[:-1] == ["moe", "losses"]:
        return {"weight": value}
    return {} if value in (None, "none") else value


def is_part_key(keys: list[str]) -> bool:
    """Whether the value at this key is a part: a stage of the router, or the objective."""
    return (keys[:2] == ["moe", "router"] and len(keys) == 3) or keys == ["train", "objective"]
