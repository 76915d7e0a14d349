"""The recipes of examples/recipes have the published numbers of parameters; no weights are built."""

import json
from pathlib import Path

import pytest

from megamoe.config import load_config
from megamoe.config.shapes import padded_vocab_size
from megamoe.model.size import model_size

RECIPES = Path(__file__).parents[1] / "examples/recipes"
PUBLISHED = json.loads((RECIPES / "published.json").read_text())


def test_every_recipe_names_a_source_and_its_numbers() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == PUBLISHED.keys()
    for path in RECIPES.glob("*.yaml"):
        comment = path.read_text().split("\nname:")[0]
        assert " et al. 20" in comment or "DeepSeek-AI 2024" in comment, path


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    """The total within 1 %, or half a unit of the table; the active ones within 1 %, or a unit, as some
    publications round down.
    """
    published = PUBLISHED[name]
    config = load_config(RECIPES / f"{name}.yaml", published.get("counted_with", []))
    words = config.model.vocab_size
    assert words is not None
    size = model_size(config, words)
    assert abs(size.total - published["total"]) <= max(published["total"] / 100, published["unit"] / 2)
    if "active" in published:
        input_words = padded_vocab_size(words, config.model.vocab_multiple) * config.model.hidden_size
        active = size.active - (input_words if published.get("without_input_embedding") else 0)
        assert abs(active - published["active"]) <= max(published["active"] / 100, published["active_unit"])
