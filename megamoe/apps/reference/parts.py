"""List every part and every preset that a configuration can name, with options, defaults and sources.

python tools/list_parts.py --kind loss --plugin my_router.py
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from megamoe import registry
from megamoe.apps.command import parser_of, run_plain

KINDS = (*registry.KINDS, "preset")
WIDTH = 108


def main(arguments: list[str] | None = None) -> int:
    """Print the list; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--kind", choices=KINDS, help="only parts of this kind")
    parser.add_argument("--plugin", action="append", default=[], help="also the parts of this file or module")
    parser.add_argument("--names", action="store_true", help="only the names of the built-in parts, at once")
    options = parser.parse_args(arguments)
    if options.names:
        names = {**registry.names_in_sources(), "preset": registry.preset_names()}
        for kind in [options.kind] if options.kind else filter(names.get, KINDS):
            print(f"{kind}: {', '.join(names[kind])}")
        return 0
    return run_plain(lambda: _list(options.kind, options.plugin))


def _list(kind: str | None, plugins: list[str]) -> None:
    for plugin in plugins:
        registry.load_plugin(plugin)
    print("\n\n".join(map(as_text, [kind] if kind else kinds())))


def kinds() -> list[str]:
    """The kinds that have parts, and presets. Callbacks come from plugins alone."""
    return [*filter(registry.list_parts, registry.KINDS), "preset"]


def as_text(kind: str) -> str:
    """Every part of a kind, for a terminal."""
    if kind == "preset":
        blocks = [
            f"  {preset.name}  ({preset.source})\n" + textwrap.indent(composition(preset), "      ")
            for preset in registry.list_presets().values()
        ]
    else:
        blocks = [text_of(name, part) for name, part in registry.list_parts(kind).items()]
    return f"{kind}\n\n" + "\n\n".join(blocks)


def text_of(name: str, part: type) -> str:
    """One part: its first sentence, its options, its source."""
    lines = [f"  {name}"] + ([wrapped(summary(part))] if summary(part) else [])
    lines += [f"      {option}: {kind} = {default}" for option, kind, default in options_of(part)]
    lines += [wrapped(meaning(part))] if meaning(part) else []
    return "\n".join([*lines, wrapped(f"source: {source(part)}")])


def wrapped(text: str) -> str:
    """Text of a part, indented under its name."""
    return textwrap.fill(text, WIDTH, initial_indent="      ", subsequent_indent="      ")


def composition(preset: registry.Preset) -> str:
    """A preset's keys of the section `moe`, as YAML."""
    return str(yaml.safe_dump(preset.tree, sort_keys=False, default_flow_style=None, width=90)).rstrip()


def options_of(part: Any) -> Iterator[tuple[str, str, str]]:
    """(name, type, default) of each option, as the YAML would say them."""
    for field in dataclasses.fields(part.Config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = "required" if default is dataclasses.MISSING else yaml_value(default)
        kind = inspect.formatannotation(field.type) if not isinstance(field.type, str) else field.type
        yield field.name, re.sub(r"typing\.|Literal", "", kind).replace("'", ""), shown


def meaning(part: Any) -> str:
    """What the docstring of the part's Config says of its options, in one line."""
    text = doc_of(part.Config)
    made_by_dataclass = text.startswith(f"{part.Config.__name__}(")
    return "" if made_by_dataclass or not dataclasses.fields(part.Config) else " ".join(text.split())


def yaml_value(value: Any) -> str:
    """A default as the YAML would say it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def summary(part: type) -> str:
    """The first paragraph of the part's docstring, without its source."""
    first = doc_of(part).split("\n\n")[0]
    return " ".join(re.sub(r"Source:.*", "", first, flags=re.DOTALL).split())


def doc_of(part: type) -> str:
    """The class's own docstring: `inspect.getdoc` would give its base's where it has none."""
    return inspect.cleandoc(part.__doc__ or "")


def source(part: type) -> str:
    """What stands after `Source:` in the part's docstring, to the end of its paragraph or the next label."""
    found = re.search(r"Source:(.*?)(?=\n\n|\bScope:|$)", doc_of(part), flags=re.DOTALL)
    return " ".join(found[1].split()) if found else "-"
