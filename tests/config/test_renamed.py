"""Keys of earlier versions: refused in the YAML with the new name, read in an older configuration."""

from collections.abc import Callable

import pytest

from megamoe.config import RunConfig, to_dict
from megamoe.config.renamed import RENAMED, with_new_names
from megamoe.errors import UserError
from tests.config.test_load import value_at
from tests.support.tiny import tiny

VALUES = {"moe.router.gate": "sigmoid", "moe.router.restrictions": [], "moe.router.system": "switch"}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_is_refused_with_the_new_one(load: Callable[..., RunConfig], old: str) -> None:
    with pytest.raises(UserError, match=f"{old}: this key is named {RENAMED[old]} now; rename it$"):
        load("name: x", f"{old}={VALUES.get(old, 0.5)}")


def test_every_new_name_is_a_key_or_a_shorthand() -> None:
    resolved = to_dict(tiny())
    for new in set(RENAMED.values()) - {"moe.router.preset"}:  # a preset is written out while it is read
        value_at(resolved, new)


def test_an_older_configuration_gets_the_new_names() -> None:
    old = {"moe": {"router": {"gate": 1, "restrictions": 2}, "expert_dropout": 3}, "seed": 5}
    new = {"moe": {"router": {"score_function": 1, "masks": 2}, "expert_output_dropout": 3}}
    assert with_new_names(old) == {**new, "seed": 5}
    assert old["moe"]["router"] == {"gate": 1, "restrictions": 2}  # type: ignore[index]
    both = with_new_names({"moe": {"router": {"gate": 1, "score_function": 2}}})
    assert both == {"moe": {"router": {"score_function": 2}}}, "the new name's value is kept"
    assert with_new_names({"moe": [1], "name": "x"}) == {"moe": [1], "name": "x"}, "no mapping"
