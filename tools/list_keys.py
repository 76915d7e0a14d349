"""Write the pages of all keys, metrics and parts, and a JSON Schema of a run's YAML for editors.

The pages are in docs/run and docs/route, their prose in docs/site. `make docs` writes them. Git ignores all
but the schema.

python tools/list_keys.py --plugin my_router.py --schema my_schema.json
"""

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe import registry
from megamoe.apps.command import parser_of
from megamoe.apps.reference.parts import composition, kinds, meaning, source, summary, yaml_value
from megamoe.apps.reference.parts import options_of as listed_options
from megamoe.config import RunConfig
from megamoe.config.moe_schema import MoELayerConfig
from megamoe.config.parts import STRICT, PartChoice, Section
from megamoe.errors import UserError
from megamoe.metrics import names

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "docs/configuration.schema.json"
FOLDERS = {"configuration.md": "run", "metrics.md": "run", "all_parts.md": "route"}
# The prose of each generated page, and the page.
GENERATED = {ROOT / "docs/site" / name: ROOT / "docs" / folder / name for name, folder in FOLDERS.items()}
KEYS, METRICS, PARTS = GENERATED
THE_RUN = "The run"  # the page's heading of the keys without a section
HEAD = ("| key | values | default | meaning |", "|---|---|---|---|")
TABLE = re.compile(r"^(\|.*\n)+", flags=re.MULTILINE)
SHOWN_BOUND = 1000  # a larger upper bound is above any real use, and is not told in the table
TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Schema = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Write the files; 2 for a plugin that cannot be loaded, or a file that cannot be written."""
    parser = parser_of(__doc__)
    parser.add_argument("--plugin", action="append", default=[], help="also the parts of this file or module")
    parser.add_argument("--schema", type=Path, metavar="FILE", help="write the JSON Schema alone")
    options = parser.parse_args(arguments)
    try:
        for plugin in options.plugin:
            registry.load_plugin(plugin)
        schema = json_schema()
        files = {options.schema or SCHEMA: as_text(schema)} | ({} if options.schema else pages(schema))
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except (UserError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"error: {reason}", file=sys.stderr)
        return 2
    return 0


def pages(schema: Schema) -> dict[Path, str]:
    """The text of each generated page; UserError for a key without a text."""
    keys, metrics, parts = (path.read_text(encoding="utf-8") for path in GENERATED)
    lists = "\n\n".join(map(as_markdown, kinds()))
    texts = with_tables(keys, schema), with_metrics(metrics), f"{parts}\n{lists}\n"
    return dict(zip(GENERATED.values(), texts, strict=True))


def as_text(schema: Schema) -> str:
    """The content of the schema's file."""
    return json.dumps(schema, indent=1) + "\n"


def json_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a run's YAML, shorthands and registered parts included."""
    # Not in every start of a run: pydantic reads the sources for the texts below the fields, in 60 ms.
    Section.__pydantic_config__ = {**STRICT, "use_attribute_docstrings": True}
    try:
        schema = tidy(TypeAdapter(RunConfig).json_schema())
        of_layer = tidy(TypeAdapter(MoELayerConfig).json_schema())["properties"]
    finally:
        Section.__pydantic_config__ = STRICT
    sections = {name: section["properties"] for name, section in schema["$defs"].items()}
    # Pydantic leaves out the texts of a base class.
    sections["LayersConfig"] |= sections["StackLayersConfig"]
    sections["GroupLayersConfig"] |= sections["GroupStackConfig"]
    for name in ("MoEConfig", "LayerGroupConfig"):
        sections[name] |= copy.deepcopy(of_layer)
    schema["$defs"]["LayerGroupConfig"]["title"] = "`{layers, any key of moe}`"
    add_parts(sections)
    add_shorthands(sections)
    schema["$defs"] |= {kind: part_schema(kind) for kind in registry.KINDS}
    schema["properties"]["base"] = {"description": "files over which this one goes", **TEXTS}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A run of megamoe", **schema}


def add_parts(sections: dict[str, Schema]) -> None:
    """Let the keys that hold parts refer to the parts of their kind. sections: the keys of each section."""
    router, train, moe = (sections[name] for name in ("RouterConfig", "TrainConfig", "MoEConfig"))
    stages = [(router, stage) for stage in registry.STAGES]
    for keys, kind in (*stages, (train, "objective"), (sections["ParallelConfig"], "exchange")):
        keys[kind] |= {"$ref": f"#/$defs/{kind}"}
    for keys, name, kind in ((router, "masks", "mask"), (train, "callbacks", "callback")):
        listed = {"type": "array", "items": {"$ref": f"#/$defs/{kind}"}}
        keys[name] = described(keys[name]) | {"anyOf": [listed, {"const": "none"}]}
    for keys in (moe, sections["LayerGroupConfig"]):
        keys["losses"] = described(keys["losses"]) | losses_schema()


def add_shorthands(sections: dict[str, Schema]) -> None:
    """Add what `load.py` and `presets.py` write out: paths for sources, `layers: none`, presets."""
    data, router, moe = (sections[name] for name in ("DataConfig", "RouterConfig", "MoEConfig"))
    group = sections["LayerGroupConfig"]
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/SourceConfig"}]}
    sources = {"anyOf": [{"type": "string"}, {"type": "array", "items": source}]}
    data["sources"] = described(data["sources"]) | sources
    recompute = sections["ModelConfig"]["recompute"]
    recompute["anyOf"] = recompute.pop("oneOf")  # pydantic's word for a union with tags
    data["validation"]["additionalProperties"] = sources
    moe["layers"] = {"anyOf": [{"$ref": "#/$defs/LayersConfig"}, {"enum": ["none", None]}]}
    preset = [{"enum": list(registry.list_presets())}, {"type": "string"}]  # known ones, and those of plugins
    for keys in (moe, group):
        keys["router"] = {"anyOf": [{"$ref": "#/$defs/RouterConfig"}, *preset]}
    blocks = {"type": "array", "items": {"type": "integer", "minimum": 1}}
    short = [blocks, {"type": "string"}]  # such as `first 2`
    group["layers"] = {"anyOf": [{"$ref": "#/$defs/GroupLayersConfig"}, *short]}
    of_stack = {"anyOf": [{"$ref": "#/$defs/GroupStackConfig"}, *short, {"type": "null"}]}
    for name in ("encoder", "decoder"):
        stacks = sections["GroupLayersConfig"]
        stacks[name] = described(stacks[name]) | of_stack
    router["preset"] = {"description": "a preset, of which the other keys change parts", "anyOf": preset}


def tidy(node: Any) -> Any:
    """A schema without pydantic's titles, which repeat the keys, and with descriptions of one line."""
    if isinstance(node, list):
        return [tidy(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {key: tidy(value) for key, value in node.items() if key != "title" or isinstance(value, dict)}
    if isinstance(text := kept.get("description"), str):
        kept["description"] = " ".join(text.split())
    return kept


def described(key: Schema) -> Schema:
    """The description of a key alone."""
    return {"description": key["description"]} if "description" in key else {}


def meanings(part: Any) -> dict[str, str]:
    """What a part says of each option, after `name: ...` or `name, name: ...` at the start of a sentence."""
    name = f"(?:{'|'.join(field.name for field in dataclasses.fields(part.Config))})"
    _, *pieces = re.split(rf"(?:^|(?<=\. ))({name}(?:, {name})*): ", meaning(part))
    told = zip(pieces[::2], pieces[1::2], strict=True)
    return {name: text.strip() for names, text in told for name in names.split(", ")}


def options_of(part: Any) -> Schema:
    """The schema of each option of a part."""
    schema, texts = tidy(TypeAdapter(part.Config).json_schema()), meanings(part)
    options = schema.get("properties", {})
    return {name: {"description": texts[name]} | it if name in texts else it for name, it in options.items()}


def part_schema(kind: str) -> Schema:
    """A part of this kind: its name, or a mapping. Names that are not known are those of plugins."""
    parts = registry.list_parts(kind)
    mappings = [
        {
            "description": summary(part),
            "type": "object",
            "properties": {"name": {"const": name}, **options_of(part)},
            "additionalProperties": False,
        }
        for name, part in parts.items()
    ]
    known = {"enum": list(parts)}
    plugin = {
        "type": "object",
        "properties": {"name": {"type": "string", "not": known}},
        "required": ["name"],
    }
    return {"title": "part", "anyOf": [known, {"type": "string"}, *mappings, plugin]}


def losses_schema() -> Schema:
    """The auxiliary losses by name: a weight, options, or none."""
    short = [{"type": "number"}, {"enum": ["none", None]}]
    named = {
        name: {
            "description": summary(part),
            "anyOf": [
                *short,
                {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, **options_of(part)},
                    "additionalProperties": False,
                },
            ],
        }
        for name, part in registry.list_parts("loss").items()
    }
    mapping = {
        "type": "object",
        "properties": named,
        "additionalProperties": {"anyOf": [*short, {"$ref": "#/$defs/loss"}]},
    }
    return {"title": "mapping of parts, or `none`", "anyOf": [mapping, {"enum": ["none", None]}]}


def as_markdown(kind: str) -> str:
    """Every part of a kind, as a table."""
    if kind == "preset":
        blocks = [
            f"### `{preset.name}`\n\n{preset.source}\n\n```yaml\n{composition(preset)}\n```"
            for preset in registry.list_presets().values()
        ]
        return "## Presets\n\n" + "\n\n".join(blocks)
    heading = f"## {registry.label(kind).capitalize()}"
    rows = [heading, "", "| name | what it does | options | source |", "|---|---|---|---|"]
    for name, part in registry.list_parts(kind).items():
        of_part = listed_options(part)
        options = "<br>".join(f"`{option}: {default}` ({kind})" for option, kind, default in of_part)
        cells = [
            f"`{name}`",
            summary(part) or "-",
            options + f"<br>{meaning(part)}".removesuffix("<br>") if options else "-",
            source(part),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def with_tables(page: str, schema: Schema) -> str:
    """The prose, with a table at the end of each section.

    Raises:
        UserError: for a key without a text.
    """
    first, *chunks = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
    headings, texts = chunks[::2], chunks[1::2]
    rows: dict[str, list[str]] = {heading: [] for heading in headings}
    for key, section, name, default in keys_of(RunConfig, RunConfig()):
        told = schema["$defs"].get(section.__name__, schema)["properties"][name]
        if "description" not in told:
            raise UserError(f"{key}: the schema has no text below this key; write what it means")
        meaning = re.sub(r"docs/([\w/]+/(\w+\.md))(#[\w-]*)?", r"[\2](../\1\3)", told["description"])
        row = f"| `{key}` | {values_of(told, schema)} | {default_of(default)} | {meaning} |"
        rows[heading_of(key, headings)].append(row)
    written = first
    for heading, text in zip(headings, texts, strict=True):
        written += "\n".join([f"## {heading}", text.rstrip(), "", *HEAD, *rows[heading], "\n"])
    return written


def with_metrics(page: str) -> str:
    """The prose with the rows of the tables, which are those of `megamoe/metrics/names.py`."""
    tables = iter(names.TABLES)

    def filled(head: re.Match[str]) -> str:
        cells = ((f"`{it.key}`", it.unit, it.formula.replace("|", "\\|"), it.logged) for it in next(tables))
        return head[0] + "".join(f"| {' | '.join(row)} |\n" for row in (("---",) * 4, *cells))

    return TABLE.sub(filled, page)


def keys_of(section: Any, defaults: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """(dotted key, its section, its name, its default) of every key.

    defaults: the section with its defaults; None for one that is not there unless it is given.
    """
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        default = field.default if defaults is None else getattr(defaults, field.name)
        inner = section_in(hints[field.name])
        if inner is None:
            yield prefix + field.name, section, field.name, default
        else:
            yield from keys_of(inner, default, f"{prefix}{field.name}.")


def heading_of(key: str, headings: list[str]) -> str:
    """The heading of a key's table: the longest section with a heading that the key is in."""
    section = key.rpartition(".")[0]
    while section and section not in headings:
        section = section.rpartition(".")[0]
    return section or THE_RUN


def section_in(hint: Any) -> Any:
    """The section of a key that holds one, also if it has required keys and is None by default; else None."""
    candidates = [hint] if isinstance(hint, type) else get_args(hint) if type(None) in get_args(hint) else []
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            fields = dataclasses.fields(candidate)  # type: ignore[arg-type]
            required = any(it.default is it.default_factory is dataclasses.MISSING for it in fields)
            return candidate if candidate is hint or required else None
    return None


def default_of(value: Any) -> str:
    """The cell of a default; empty if the key is not set."""
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, PartChoice):
        return f"`{value.name}`"
    return "" if value in (None, [], {}) else f"`{yaml_value(value)}`"


def values_of(key: Schema, schema: Schema) -> str:
    """The legal values of a key in words."""
    if "$ref" in key:
        return values_of(schema["$defs"][key["$ref"].rpartition("/")[2]], schema)
    if "title" in key:
        return str(key["title"])
    if "anyOf" in key:
        kinds = [it for it in key["anyOf"] if it.get("type") != "null"]
        return ", or ".join(dict.fromkeys(values_of(it, schema) for it in kinds))
    if "enum" in key or "const" in key:
        return ", ".join(f"`{yaml_value(value)}`" for value in key.get("enum", [key.get("const")]))
    match key["type"]:
        case "array":
            items = values_of(key["items"], schema)
            return (
                f"list of ({items})"
                if "anyOf" in key["items"]
                else f"list of {items}{'s' * (items == 'part')}"
            )
        case "object" if "properties" in key:
            return f"{{{', '.join(key['properties'])}}}"
        case "object":
            return f"name: {values_of(key['additionalProperties'], schema)}"
        case "integer" | "number" as kind:
            return bounds_of(key, "int" if kind == "integer" else "number")
        case "boolean":
            return "`true`, `false`"
    return "text"


def bounds_of(key: Schema, kind: str) -> str:
    """A number's bounds, such as `0 <= number < 1`; an upper one only if a real value may be near."""
    low = [key[name] for name in ("minimum", "exclusiveMinimum") if name in key]
    above = ">" if "exclusiveMinimum" in key else ">="
    if "exclusiveMaximum" in key or key.get("maximum", SHOWN_BOUND + 1) <= SHOWN_BOUND:
        below = "<" if "exclusiveMaximum" in key else "<="
        highest = key.get("exclusiveMaximum", key.get("maximum"))
        highest = "2^32" if highest == 1 << 32 else highest
        return f"{low[0]:g} {above.replace('>', '<')} {kind} {below} {highest}"
    return f"{kind} {above} {low[0]:g}" if low else kind


if __name__ == "__main__":
    sys.exit(main())
