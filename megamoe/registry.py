"""The registry of parts by name; does not import torch.

A part is one class with a `Config` dataclass. `register(kind, name)` makes it available in the YAML;
importing its file is enough. Parts come from three places:

- the built-in packages (`BUILTIN_PACKAGES`), imported once at the first look-up;
- a user's file or module, loaded only if `plugins:` names it;
- an installed package's entry point in the group `megamoe.plugins`, also only if named.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megamoe.errors import UserError
from megamoe.io import real

ENTRY_POINT_GROUP = "megamoe.plugins"
BUILTIN_PACKAGES = (
    "megamoe.moe.scorers",
    "megamoe.moe.residuals",
    "megamoe.moe.masks",
    "megamoe.moe.score_functions",
    "megamoe.moe.selectors",
    "megamoe.moe.losses",
    "megamoe.moe.capacity",
    "megamoe.moe.dispatch",
    "megamoe.moe.presets",
    "megamoe.zoo",
    "megamoe.objectives",
    "megamoe.apps.chat.objectives",
    "megamoe.apps.finetune.objectives",
    "megamoe.apps.translation.objectives",
)
PRESETS = ("megamoe.moe.presets", "megamoe.zoo.presets")  # modules of these; they import no torch
REGISTERED = re.compile(r'^@(?:registry\.)?register\(\s*"(\w+)",\s*"(\w+)"', re.MULTILINE)
# What a run calls of the applications where its configuration asks for it: module and name of each entry. The
# core imports no application; it asks for one by name, as for a part.
APPLICATIONS = {
    "report": ("megamoe.apps.report.page", "write_report"),  # log.report
    "routing_record": ("megamoe.apps.routing_record.replay", "RunRouting"),  # log.routing, moe.router.replay
}
# A loss is logged as train/<name>; `megamoe/metrics/names.py` has these keys.
RESERVED_LOSS_NAMES = ("lm_loss", "loss", "grad_norm", "lr", "batch_size", "loss_scale", "skipped_steps")
# Of these an MoE layer is made.
LAYER_KINDS = ("scorer", "residual", "mask", "score_function", "selector", "capacity", "loss")
KINDS = (*LAYER_KINDS, "exchange", "callback", "objective")
# The router's stages with one part each.
STAGES = ("scorer", "residual", "score_function", "selector", "capacity")
MOST_NAMES = 30  # that a message lists

_parts: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}
_presets: dict[str, "Preset"] = {}
_plugin_files: dict[str, dict[str, Path]] = {}  # plugin as named -> its source files by name
_plugin_digests: dict[str, dict[str, str]] = {}  # plugin as named -> their SHA-256 when it was loaded
_discovered = False
_only_names = False  # see `names_only`

PartClass = TypeVar("PartClass", bound=type)


def register(kind: str, name: str) -> Callable[[PartClass], PartClass]:
    """Class decorator that registers a part of `kind` under `name`.

    Raises:
        ValueError: if the kind does not exist, the name is invalid or already used by another class, the
            class has no `Config` dataclass, or a loss's `Config` has no `weight`.
    """
    if kind not in _parts:
        raise ValueError(f"register: unknown kind {kind!r}, expected one of {', '.join(KINDS)}")
    _check_name(label(kind), name)

    def decorate(part: PartClass) -> PartClass:
        known = _parts[kind].get(name)
        if known is not None and _full_name(known) != _full_name(part):
            raise ValueError(
                f"{label(kind)} {name!r} is registered twice: {_full_name(known)} and {_full_name(part)}"
            )
        fields = getattr(getattr(part, "Config", None), "__dataclass_fields__", None)
        if fields is None:
            raise ValueError(f"{label(kind)} {name!r}: {part.__qualname__} needs a nested dataclass `Config`")
        if kind == "loss" and "weight" not in fields:
            raise ValueError(f"loss {name!r}: the `Config` of {part.__qualname__} needs a field `weight`")
        if kind == "loss" and name in RESERVED_LOSS_NAMES:
            raise ValueError(
                f"loss {name!r}: train/{name} is another figure of the record; choose another name"
            )
        _parts[kind][name] = part
        return part

    return decorate


def label(kind: str) -> str:
    """Return a kind of parts in words: `score function`."""
    return kind.replace("_", " ")


def is_name(name: object) -> bool:
    """Whether the text can name a part, preset or loss: lower-case letters, digits and _, a letter first."""
    return isinstance(name, str) and re.fullmatch("[a-z][a-z0-9_]*", name) is not None


def _check_name(what: str, name: object) -> None:
    if not is_name(name):
        raise ValueError(f"{what} {name!r}: expected a name of small letters, digits and _, a letter first")


@dataclass(frozen=True)
class Preset:
    """A named combination of parts, chosen by `router: <name>`.

    tree: keys of the section `moe` (router, losses, num_shared_experts, ...) as in the YAML.
    """

    name: str
    tree: dict[str, Any]
    source: str


def register_preset(name: str, tree: dict[str, Any], source: str) -> None:
    """Register a combination of parts as `router: <name>`.

    Its router may build on a preset that is already registered: `{"router": "switch", ...}`.

    Raises:
        ValueError: if the name is invalid or used by another preset, or if the tree is not valid YAML data.
    """
    _check_name("preset", name)
    try:
        _check_tree(tree)
    except ValueError as error:
        raise ValueError(f"preset {name!r}: {error}") from None
    preset = Preset(name, tree, source)
    if _presets.setdefault(name, preset) != preset:
        raise ValueError(f"preset {name!r} is registered twice; give one of them another name")


def _check_tree(tree: Any) -> None:
    """Check what merging needs; the schema checks the rest when the preset is used."""
    try:
        json.dumps(tree)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected plain data, as the YAML has it: {error}") from None
    _expect(tree, "the tree", dict)
    router = tree.get("router", {})
    _expect(router, "router", dict, str)
    router = {"preset": router} if isinstance(router, str) else router
    if "preset" in router:
        _expect(router["preset"], "router.preset", str)
        get_preset(router["preset"])
    for stage in STAGES:
        part = router.get(stage, {})
        _expect(part, f"router.{stage}", dict, str)
        _expect(part.get("name", "") if isinstance(part, dict) else part, f"router.{stage}.name", str)
    if tree.get("losses", {}) != "none":
        _expect(tree.get("losses", {}), "losses", dict)


def _expect(value: Any, key: str, *types: type) -> None:
    if not isinstance(value, types):
        wanted = " or ".join("text" if kind is str else "a mapping" for kind in types)
        raise ValueError(f"{key}: expected {wanted}, found {value!r}")


class NamedPart:
    """Stands for a built-in part whose module is not imported: see `names_only`."""

    Config = dict


def get_preset(name: str) -> Preset:
    """Return the preset registered as `name`; if there is none, raise UserError with the nearest name."""
    discover()
    if name not in _presets:
        raise UserError(unknown_name_message("preset", name, list(_presets)))
    return _presets[name]


def list_presets() -> dict[str, Preset]:
    """Return every registered preset, in the order of registration."""
    discover()
    return dict(_presets)


def _full_name(part: type) -> str:
    return f"{part.__module__}.{part.__qualname__}"


def get_part(kind: str, name: str) -> Any:
    """Return the class registered as `name`; if there is none, raise UserError with the nearest name."""
    known = _known(kind)
    if name not in known:
        raise UserError(unknown_name_message(label(kind), name, list(known)))
    return known[name]


def list_parts(kind: str) -> dict[str, type]:
    """Return every registered part of a kind, by name."""
    return dict(sorted(_known(kind).items()))


def _known(kind: str) -> dict[str, type]:
    if _only_names and not _discovered:
        return dict.fromkeys(names_in_sources()[kind], NamedPart)
    discover()
    return _parts[kind]


def unknown_name_message(what: str, name: object, known: list[str]) -> str:
    """Return one line: the unknown name, the nearest known one, and all known names."""
    return f"unknown {what} {name!r}{nearest_and_all(name, known)}"


def nearest_and_all(name: object, known: list[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, and all known names.

    Of more than MOST_NAMES names the nearest alone, if there is one.
    """
    near = nearest(name, known)
    if near and len(set(known)) > MOST_NAMES:
        return near
    names = f"known: {', '.join(sorted(set(known)))}" if known else "there are none"
    return f"{near} ({names})"


def nearest(name: object, known: list[str]) -> str:
    """Return `; did you mean 'x'?`, or nothing if no known name is close."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@functools.cache
def names_in_sources() -> dict[str, list[str]]:
    """Return the names of the built-in parts by kind, sorted, from the text of their modules.

    Nothing is imported but the packages that hold them.
    """
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for package_name in BUILTIN_PACKAGES:
        package = importlib.util.find_spec(package_name)
        for folder in (package and package.submodule_search_locations) or ():
            for path in Path(folder).rglob("*.py"):
                for kind, name in REGISTERED.findall(path.read_text(encoding="utf-8")):
                    names[kind].append(name)
    return {kind: sorted(found) for kind, found in names.items()}


def preset_names() -> list[str]:
    """Return the names of the presets, sorted; of the built-in ones no part is imported."""
    with names_only():
        return sorted(list_presets())


@contextmanager
def names_only() -> Iterator[None]:
    """In this context a part is known by its name: `get_part` returns `NamedPart`, and imports no torch.

    Presets are whole. Where the built-in parts have been imported before, nothing changes.
    """
    global _only_names
    _only_names = True
    try:
        yield
    finally:
        _only_names = False


def discover() -> None:
    """Import every module of the built-in packages, once; of `names_only`, the presets alone."""
    global _discovered
    if _discovered:
        return
    if _only_names:
        for package_name in PRESETS:
            importlib.import_module(package_name)
        return
    _discovered = True
    for package_name in BUILTIN_PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{package_name}."):
            importlib.import_module(module.name)


def application(name: str) -> Any:
    """Return the entry of an application that runs call: a key of `APPLICATIONS`, imported when asked for."""
    module, entry = APPLICATIONS[name]
    return getattr(importlib.import_module(module), entry)


def load_plugin(reference: str) -> str:
    """Import the plugin that the user named: a .py file, an entry point, or a dotted module.

    A relative file is searched in the working directory. Return the name by which it is found again from
    there: of a file its `configured_path`.

    Raises:
        UserError: if it cannot be found, or if it raises while it is imported.
    """
    discover()
    path = _find_file(reference) if reference.endswith(".py") else None
    entry_points = {p.name: p for p in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    try:
        if path is not None:
            _run_file(path)
            files = {path.name: path}
        elif reference in entry_points:
            entry_points[reference].load()
            files = _files_of(entry_points[reference].module)
        else:
            importlib.import_module(reference)
            files = _files_of(reference)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if path is None and f"{reference}.".startswith(f"{missing}."):
            raise UserError(
                f"plugins: no module {reference!r}; expected a .py file, an installed module or an entry "
                f"point of {ENTRY_POINT_GROUP}{nearest_and_all(reference, list(entry_points))}"
            ) from None
        raise UserError(f"plugins: {reference!r} failed{_failure(error, str(path))}") from error
    reference = configured_path(path) if path is not None else reference
    _plugin_files[reference] = files
    _plugin_digests[reference] = {
        name if path is not None else f"{reference}: {name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in files.items()
        if file.is_file()
    }
    return reference


def configured_path(path: Path) -> str:
    """Return a file's path for a configuration: relative in the working directory, absolute elsewhere."""
    path, here = real(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def plugin_digests(references: list[str]) -> dict[str, str]:
    """Return the SHA-256 of each source file of plugins, as they were when `load_plugin` was last called.

    The keys do not say where files are: `mine.py` for a file, `package: router.py` for one of a module. Files
    of the same name have one digest together.
    """
    found: dict[str, str] = {}
    for reference in references:
        for name, digest in _plugin_digests.get(reference, {}).items():
            before = found.get(name, digest)
            both = hashlib.sha256((before + digest).encode()).hexdigest()
            found[name] = digest if before == digest else both
    return found


def plugin_files(reference: str) -> dict[str, Path]:
    """Return the source files of a loaded plugin: its own, or those of its whole package."""
    return _plugin_files.get(reference, {})


def _files_of(module: str) -> dict[str, Path]:
    package = sys.modules.get(sys.modules[module].__package__ or "")
    folders = [Path(folder) for folder in getattr(package, "__path__", [])]
    if not folders:
        file = sys.modules[module].__file__
        return {Path(file).name: Path(file)} if file else {}
    return {
        str(path.relative_to(folder)): path for folder in folders for path in sorted(folder.rglob("*.py"))
    }


def is_ours(part: type) -> bool:
    """Whether a part is built in; an error inside it is then a bug and keeps its traceback."""
    return part.__module__.startswith("megamoe.")


def described(part: type, with_file: bool = True) -> str:
    """Return a part by its kind and name, and its file: `scorer 'nearest' (nearest.py)`."""
    known = ((label(kind), name) for kind, parts in _parts.items() for name in parts if parts[name] is part)
    kind, name = next(known, ("part", part.__qualname__))
    file = getattr(sys.modules.get(part.__module__), "__file__", None)
    return f"{kind} {name!r}" + (f" ({Path(file).name})" if file and with_file else "")


@contextmanager
def naming_failures(part: type, what: str) -> Iterator[None]:
    """Turn what a plugin's part raises into a UserError with its file and line; what: begins the message."""
    try:
        yield
    except Exception as error:
        if is_ours(part) or isinstance(error, UserError):
            raise
        raise UserError(f"{what} failed{failure_of(part, error)}") from error


def failure_of(part: type, error: BaseException) -> str:
    """Return what a plugin's part raised and where: ` at line 7 of mine.py: TypeError: ...`."""
    file = getattr(sys.modules.get(part.__module__), "__file__", None)
    return _failure(error, file, f" of {Path(file).name}" if file else "")


def _failure(error: BaseException, file: str | None, named: str = "") -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    place = f" at line {lines[-1]}{named}" if lines else ""
    text = re.sub("For further information visit .*", "", str(error))  # pydantic's
    return f"{place}: {' '.join(f'{type(error).__name__}: {text}'.split())}"


def _find_file(reference: str) -> Path:
    with suppress(OSError):  # a name that is too long
        if Path(reference).is_file():
            return real(Path(reference))
    where = "" if Path(reference).is_absolute() else f" in {Path.cwd()}, nor beside a YAML that names it"
    raise UserError(f"plugins: no file {reference!r}{where}; expected a path to a .py file")


def _run_file(path: Path) -> None:
    module_name = f"megamoe_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return
    spec: Any = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
