"""tools/list_parts.py lists every part and preset from the code."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megamoe import registry
from tests.support.moe.part_layers import PARTS
from tests.support.tiny import ROOT, tool

Listed = Callable[..., str]
# A part that no paper needs: it does nothing.
WITHOUT_SOURCE = {("residual", "none"), ("capacity", "none")}


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Listed:
    """What the tool prints."""

    def call(*arguments: str) -> str:
        assert tool("list_parts").main(list(arguments)) == 0
        return capsys.readouterr().out

    return call


def test_every_part_with_its_options_defaults_and_source(listed: Listed) -> None:
    texts = {kind: listed("--kind", kind) for kind in registry.LAYER_KINDS}
    for kind, name in PARTS:
        block = texts[kind].split(f"\n  {name}\n")[1].split("\n\n")[0]
        part: Any = registry.list_parts(kind)[name]
        for field in dataclasses.fields(part.Config):
            default = json.dumps(field.default).strip('"')
            line = next(line for line in block.splitlines() if line.startswith(f"      {field.name}: "))
            assert line.endswith(f" = {default}"), (kind, name, line)
        assert (kind, name) in WITHOUT_SOURCE or "source: -" not in block, f"{name}: a line `Source: ...`"


def test_every_preset_with_its_source(listed: Listed) -> None:
    text = listed("--kind", "preset")
    for name in registry.list_presets():
        preset = registry.get_preset(name)
        block = text.split(f"\n  {name}  (")[1].split("\n\n")[0]
        assert preset.source in block and yaml.safe_load(block.split("\n", 1)[1]) == preset.tree


def test_plugins_are_listed(listed: Listed, own_registry: None) -> None:
    text = listed("--plugin", str(ROOT / "examples/own_router.py"), "--kind", "scorer")
    assert "\n  distance\n" in text
    assert "temperature: float = 1.0" in text


WITHOUT_DOCSTRING = """
from dataclasses import dataclass
from megamoe.moe.score_functions.sigmoid import SigmoidScoreFunction
from megamoe.registry import register


@register("score_function", "untold")
class Untold(SigmoidScoreFunction):
    @dataclass
    class Config:
        untold_x: int = 5
"""


def test_a_plugin_without_docstrings_shows_none(listed: Listed, tmp_path: Path, own_registry: None) -> None:
    (tmp_path / "untold.py").write_text(WITHOUT_DOCSTRING)
    arguments = ("--kind", "score_function", "--plugin", str(tmp_path / "untold.py"))
    block = listed(*arguments).split("\n  untold\n")[1].split("\n\n")[0]
    assert block.splitlines() == ["      untold_x: int = 5", "      source: -"]
    assert "\n| `untold` | - | `untold_x: 5` (int) | - |" in tool("list_keys").as_markdown("score_function")
