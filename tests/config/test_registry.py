"""The registry: what it refuses, and what it finds by itself."""

from dataclasses import dataclass
from typing import Any

import pytest

from megamoe import registry
from megamoe.errors import UserError

pytestmark = pytest.mark.usefixtures("own_registry")


class Part:
    @dataclass
    class Config:
        weight: float = 1.0


@dataclass
class Weightless:
    strength: float = 1.0


def test_a_part_is_found_by_its_name() -> None:
    assert registry.register("score_function", "mine")(Part) is Part
    assert registry.get_part("score_function", "mine") is Part
    assert "mine" in registry.list_parts("score_function")
    assert "mine" not in registry.list_parts("scorer")
    registry.register("score_function", "weightless")(type("X", (), {"Config": Weightless}))


def test_the_built_in_packages_are_discovered_and_sorted() -> None:
    assert list(registry.list_parts("score_function")) == sorted(registry.list_parts("score_function"))
    assert {"softmax", "sigmoid"} <= registry.list_parts("score_function").keys()
    assert {"switch_balance", "z_loss"} <= registry.list_parts("loss").keys()
    assert {"none", "per_expert"} <= registry.list_parts("capacity").keys()


def test_two_parts_of_one_name_are_refused() -> None:
    registry.register("score_function", "mine")(Part)
    registry.register("score_function", "mine")(Part)  # the same class again: a module that was imported anew
    other = type("Part", (Part,), {"__module__": "elsewhere"})
    with pytest.raises(ValueError, match=r"function 'mine' is registered twice: .*Part and elsewhere\.Part$"):
        registry.register("score_function", "mine")(other)
    assert registry.get_part("score_function", "mine") is Part


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("score_function", object, "score function 'bare': object needs a nested dataclass `Config`"),
        ("score_function", type("X", (), {"Config": object}), "needs a nested dataclass `Config`"),
        ("loss", type("X", (), {"Config": Weightless}), "loss 'bare': the `Config` of X needs a field `w"),
        ("gates", Part, "unknown kind 'gates', expected one of scorer, residual, mask, score_function, "),
    ],
)
def test_what_cannot_be_a_part(kind: str, part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.register(kind, "bare")(part)


@pytest.mark.parametrize("name", ["lab.margin", "Margin", "2nd", "a b", "", "größe", "a\n", None])
def test_names_are_lower_case_words(name: str) -> None:
    with pytest.raises(ValueError, match="^loss .*: expected a name of small letters, digits and _, a le"):
        registry.register("loss", name)(Part)
    with pytest.raises(ValueError, match="^preset .*: expected a name of small letters"):
        registry.register_preset(name, {}, "here")


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (None, "the tree: expected a mapping, found None"),
        ([], "the tree: expected a mapping, found []"),
        ({"router": None}, "router: expected a mapping or text, found None"),
        ({"router": "swich"}, "unknown preset 'swich'; did you mean 'switch'?"),
        ({"router": "mine"}, "unknown preset 'mine' ("),
        ({"router": {"preset": ["switch"]}}, "router.preset: expected text, found"),
        ({"router": {"scorer": 3}}, "router.scorer: expected a mapping or text, found 3"),
        ({"router": {"selector": {"name": None}}}, "router.selector.name: expected text, found None"),
        ({"losses": ["z_loss"]}, "losses: expected a mapping, found"),
        ({"losses": None}, "losses: expected a mapping, found None"),
        ({"router": {"score_function": {"x": object}}}, "expected plain data, as the YAML has it: Object"),
    ],
)
def test_a_presets_tree_is_valid_yaml_data(tree: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        registry.register_preset("mine", tree, "here")
    assert str(caught.value).startswith(f"preset 'mine': {expected}")
    assert "mine" not in registry.list_presets()


def test_an_unknown_name_shows_the_nearest_and_all() -> None:
    with pytest.raises(UserError, match=r"function 'sofmax'; did you mean 'softmax'\? \(known: .*sigmoid, "):
        registry.get_part("score_function", "sofmax")
    with pytest.raises(UserError, match=r"^unknown score function 'qqq' \(known: "):
        registry.get_part("score_function", "qqq")
