"""tools/list_keys.py: the JSON Schema and the generated pages are whole."""

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megamoe import registry
from megamoe.config.yaml_text import parse_yaml
from megamoe.errors import UserError
from megamoe.metrics import names
from tests.support.moe.part_layers import PART_IDS, PARTS
from tests.support.tiny import ROOT, tool

FOLDERS = ("presets", "papers", "catalogues")
RUNS = [
    *(ROOT / "examples").glob("*.yaml"),
    *(path for folder in FOLDERS for path in (ROOT / "examples" / folder).rglob("*.yaml")),
]
TYPES: dict[str, Any] = {
    **{"object": dict, "array": list, "string": str, "integer": int, "number": int | float},
    **{"boolean": bool, "null": type(None)},
}
WITHOUT_EFFECT = {"$schema", "$defs", "title", "description", "default"}


@pytest.fixture
def built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the parts of megamoe, whatever plugins other tests have loaded."""
    parts = {
        kind: {name: part for name, part in of_kind.items() if part.__module__.startswith("megamoe.")}
        for kind, of_kind in registry._parts.items()
    }
    monkeypatch.setattr(registry, "_parts", parts)


def test_the_schema_is_what_the_command_writes(built_in: None) -> None:
    command = tool("list_keys")
    schema = command.json_schema()
    assert command.SCHEMA.read_text(encoding="utf-8") == command.as_text(schema), "run tools/list_keys.py"


def test_each_row_of_the_pages_has_all_cells(built_in: None) -> None:
    """No cell of a metric or a part is empty, and a bar inside a cell is escaped."""
    command = tool("list_keys")
    texts = command.pages(command.json_schema())
    rows = {
        prose: [line.replace("\\|", "") for line in texts[page].splitlines() if line.startswith("| `")]
        for prose, page in command.GENERATED.items()
    }
    parts = sum(len(registry.list_parts(kind)) for kind in registry.KINDS)
    assert len(rows[command.PARTS]) == parts and len(rows[command.KEYS]) > 200
    assert len(rows[command.METRICS]) == sum(map(len, names.TABLES))
    assert all(line.count("|") == 5 for lines in rows.values() for line in lines)
    assert [line for line in rows[command.METRICS] + rows[command.PARTS] if "|  |" in line] == []


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether a value is valid, by the keywords of JSON Schema that the command writes."""
    named = value if isinstance(value, dict) else {}
    listed = value if isinstance(value, list) else []
    is_bool = isinstance(value, bool)
    number = value if isinstance(value, int | float) and not is_bool else None
    others = named.keys() - schema.get("properties", {}).keys()
    keywords: dict[str, Callable[[Any], bool]] = {
        "$ref": lambda it: fits(value, whole["$defs"][it.rpartition("/")[2]], whole),
        "anyOf": lambda it: any(fits(value, one, whole) for one in it),
        "not": lambda it: not fits(value, it, whole),
        "const": lambda it: value == it,
        "enum": lambda it: value in it,
        "type": lambda it: isinstance(value, TYPES[it]) and is_bool == (it == "boolean"),
        "minimum": lambda it: number is None or number >= it,
        "maximum": lambda it: number is None or number <= it,
        "exclusiveMinimum": lambda it: number is None or number > it,
        "exclusiveMaximum": lambda it: number is None or number < it,
        "items": lambda it: all(fits(one, it, whole) for one in listed),
        "required": lambda it: named.keys() >= set(it),
        "properties": lambda it: all(fits(named[key], it[key], whole) for key in named.keys() & it.keys()),
        "additionalProperties": lambda it: all(it and fits(named[key], it, whole) for key in others),
    }
    return all(keywords[keyword](it) for keyword, it in schema.items() if keyword not in WITHOUT_EFFECT)


@cache
def schema_of_all() -> Any:
    return tool("list_keys").json_schema()


def test_the_examples_fit_the_schema(built_in: None) -> None:
    schema = schema_of_all()
    assert len(RUNS) > 100
    unfit = [path.name for path in RUNS if not fits(parse_yaml(path.read_text()), schema, schema)]
    assert unfit == []


@pytest.mark.parametrize(
    "mistake",
    [
        {"model": {"num_layer": 2}},
        {"model": {"latent": {"rope_size": 4}}},
        {"moe": {"router": {"selector": {"name": "top_k", "kk": 2}}}},
        {"moe": {"losses": {"z_loss": {"wait": 1}}}},
        {"train": {"steps": 0}},
        {"train": {"hang_minutes": 0.001}},
        {"data": {"sources": [{"weight": 1}]}},
        {"optimizer": {"schedule": "cosinus"}},
        {"log": {"report": 1}},
    ],
    ids=json.dumps,
)
def test_a_mistake_does_not_fit_the_schema(mistake: dict[str, Any]) -> None:
    schema = schema_of_all()
    assert not fits(mistake, schema, schema)


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=PART_IDS)
def test_each_option_of_a_part_has_its_text(kind: str, name: str) -> None:
    part: Any = registry.list_parts(kind)[name]
    texts = tool("list_keys").meanings(part)
    assert texts.keys() == {field.name for field in dataclasses.fields(part.Config)} and all(texts.values())


def test_a_schema_with_a_plugins_parts(tmp_path: Path, own_registry: None) -> None:
    plugin, path = str(ROOT / "examples/own_router.py"), tmp_path / "schema.json"
    assert tool("list_keys").main(["--plugin", plugin, "--schema", str(path)]) == 0
    names = json.loads(path.read_text())["$defs"]["scorer"]["anyOf"][0]["enum"]
    assert {"distance", "linear"} <= set(names)


def test_a_key_without_a_text_is_named() -> None:
    command = tool("list_keys")
    schema = command.json_schema()
    del schema["$defs"]["TrainConfig"]["properties"]["epochs"]["description"]
    with pytest.raises(UserError, match="train.epochs: the schema has no text below this key"):
        command.pages(schema)
