"""The registry: what it refuses, and what it finds by itself."""

from dataclasses import dataclass

import pytest

from megamoe import registry
from megamoe.errors import UserError

pytestmark = pytest.mark.usefixtures("own_registry")


class Part:
    @dataclass
    class Config:
        weight: float = 1.0


def test_a_part_is_found_by_its_name() -> None:
    assert registry.register("gate", "mine")(Part) is Part
    assert registry.get_part("gate", "mine") is Part
    assert "mine" in registry.list_parts("gate")
    assert "mine" not in registry.list_parts("scorer")


def test_the_built_in_rooms_are_discovered_and_sorted() -> None:
    assert list(registry.list_parts("gate")) == sorted(registry.list_parts("gate"))
    assert {"softmax", "sigmoid"} <= registry.list_parts("gate").keys()
    assert {"switch_balance", "z_loss"} <= registry.list_parts("loss").keys()
    assert {"none", "per_expert"} <= registry.list_parts("capacity").keys()


def test_two_parts_of_one_name_are_refused() -> None:
    registry.register("gate", "mine")(Part)
    registry.register("gate", "mine")(Part)  # the same class again: a module that was imported anew
    other = type("Part", (Part,), {"__module__": "elsewhere"})
    with pytest.raises(
        ValueError, match=r"gate 'mine' is registered twice: .*Part and elsewhere\.Part; give"
    ):
        registry.register("gate", "mine")(other)
    assert registry.get_part("gate", "mine") is Part


def test_a_part_needs_a_config() -> None:
    with pytest.raises(ValueError, match="gate 'bare': object needs a nested dataclass `Config`"):
        registry.register("gate", "bare")(object)
    no_dataclass = type("NoDataclass", (), {"Config": type("Config", (), {})})
    with pytest.raises(ValueError, match="needs a nested dataclass `Config`"):
        registry.register("gate", "bare")(no_dataclass)


def test_a_loss_needs_a_weight() -> None:
    @dataclass
    class Config:
        strength: float = 1.0

    weightless = type("Weightless", (), {"Config": Config})
    with pytest.raises(ValueError, match="loss 'bare': the `Config` of Weightless needs a field `weight`"):
        registry.register("loss", "bare")(weightless)
    registry.register("gate", "fine")(weightless)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind 'gates', expected one of scorer, restriction, gate, "):
        registry.register("gates", "x")


def test_an_unknown_name_shows_the_nearest_and_all() -> None:
    with pytest.raises(
        UserError, match=r"^unknown gate 'sofmax'; did you mean 'softmax'\? \(known: .*sigmoid, "
    ):
        registry.get_part("gate", "sofmax")
    with pytest.raises(UserError, match=r"^unknown gate 'qqq' \(known: "):
        registry.get_part("gate", "qqq")
