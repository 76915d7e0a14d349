"""Keys of earlier versions: refused in the YAML with the new name, read in an older configuration."""

from collections.abc import Callable
from typing import Any

import pytest

from megamoe.config import RunConfig, to_dict
from megamoe.config.renamed import RENAMED, with_new_names
from megamoe.errors import UserError
from tests.tiny import tiny

VALUES = {"moe.router.gate": "sigmoid", "moe.router.restrictions": [], "moe.router.system": "switch"}


def value_at(tree: dict[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node[part]
    return node


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_is_refused_with_the_new_one(load: Callable[..., RunConfig], old: str) -> None:
    with pytest.raises(UserError, match=f"{old}: this key is named {RENAMED[old]} now; rename it$"):
        load("name: x", f"{old}={VALUES.get(old, 0.5)}")


def test_every_new_name_is_a_key_or_a_shorthand() -> None:
    resolved = to_dict(tiny())
    for new in set(RENAMED.values()) - {"moe.router.preset"}:  # a preset is written out while it is read
        value_at(resolved, new)


def test_an_older_configuration_gets_the_new_names() -> None:
    old = {
        "moe": {"router": {"gate": 1, "restrictions": 2}, "expert_dropout": 3},
        "seed": 5,
    }
    new = {"moe": {"router": {"score_function": 1, "masks": 2}, "expert_output_dropout": 3}}
    assert with_new_names(old) == {**new, "seed": 5}
    assert old["moe"]["router"] == {"gate": 1, "restrictions": 2}  # type: ignore[index]


def test_an_existing_new_name_keeps_its_value() -> None:
    assert with_new_names({"moe": {"router": {"gate": 1, "score_function": 2}}}) == {
        "moe": {"router": {"score_function": 2}}
    }


def test_what_is_no_mapping_is_left_alone() -> None:
    assert with_new_names({"moe": [1], "name": "x"}) == {"moe": [1], "name": "x"}
