"""Keys of earlier versions: read under the new name, with a warning where a user wrote them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.config import RunConfig, to_dict
from megamoe.config.renamed import RENAMED, with_new_names
from megamoe.errors import UserError
from tests.config.test_load import value_at
from tests.support.tiny import tiny

VALUES = {
    "moe.router.gate": "sigmoid",
    "moe.router.restrictions": [{"name": "expert_dropout", "rate": 0.25}],
    "moe.router.system": "switch",
}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_is_read_under_its_new_name(
    load: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], old: str
) -> None:
    value = VALUES.get(old, 0.5)
    found = load("name: x", f"{old}={value}")
    warning = f": {old} is named {RENAMED[old]} now; it is read under this name\n"
    assert capsys.readouterr().err.endswith(warning)
    assert to_dict(found) == to_dict(load("name: x", f"{RENAMED[old]}={value}")) != to_dict(load("name: x"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("old", "new"), [("gate", "score_function"), ("score_function", "gate")])
def test_an_override_counts_whatever_name_the_file_has(
    load: Callable[..., RunConfig], tmp_path: Path, old: str, new: str
) -> None:
    (tmp_path / "base.yaml").write_text(f"moe: {{router: {{{old}: sigmoid}}}}")
    for text, override in (
        (f"moe: {{router: {{{old}: sigmoid}}}}", f"moe.router.{new}=softmax"),
        (f"base: base.yaml\nmoe: {{router: {{{new}: softmax}}}}", "seed=1234"),
        ("name: x", "moe.router={gate: softmax}"),
    ):
        assert to_dict(load(text, override))["moe"]["router"]["score_function"]["name"] == "softmax"
    router = to_dict(load("name: x", f"moe.router.{old}.name=sigmoid"))["moe"]["router"]
    assert router["score_function"]["name"] == "sigmoid"


def test_a_key_under_both_names_is_refused(load: Callable[..., RunConfig]) -> None:
    with pytest.raises(UserError, match=r"moe\.router\.gate and moe\.router\.score_function are one key"):
        load("moe: {router: {gate: sigmoid, score_function: softmax}}")


def test_other_ranks_are_silent(
    load: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    load("moe: {router: {gate: sigmoid}}")
    assert capsys.readouterr().err == ""


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
