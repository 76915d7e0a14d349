"""Presets by name: written out, overridden in part, refused with the nearest name."""

from typing import Any

import pytest
import yaml

from megamoe import registry
from megamoe.config import RunConfig, dump_yaml, load_config, parse_config
from megamoe.errors import UserError

TREE: dict[str, Any] = {
    "num_shared_experts": 2,
    "router": {
        "scorer": {"name": "linear", "jitter": 0.25},
        "score_function": "sigmoid",
        "selector": {"name": "top_k", "k": 3, "scale": 2.0},
        "capacity": {"name": "per_expert", "factor": 3.0},
    },
    "losses": {"switch_balance": {"weight": 0.5, "first_choice": True}, "z_loss": 0.25},
}


@pytest.fixture(autouse=True)
def own_preset(own_registry: None) -> None:
    registry.register_preset("own", TREE, "these tests")


def moe(**tree: Any) -> Any:
    return parse_config({"moe": tree}).moe


@pytest.mark.parametrize("router", ["own", {"preset": "own"}])
def test_a_presets_name_alone_is_enough(router: Any) -> None:
    assert moe(router=router) == moe(**TREE)


def test_an_option_is_merged_into_the_presets_part() -> None:
    found = moe(router={"preset": "own", "selector": {"k": 2}, "scorer": {"name": "linear", "jitter": 0.5}})
    assert (found.router.selector.options.k, found.router.selector.options.scale) == (2, 2.0)
    assert found.router.scorer.options.jitter == 0.5
    assert found.router.score_function.name == "sigmoid"
    named = moe(router={"preset": "own", "scorer": "linear"})
    assert named.router.scorer.options.jitter == 0.25, "the name alone of the same part keeps its options"


def test_another_part_takes_the_place() -> None:
    found = moe(
        router={
            "preset": "own",
            "capacity": "none",
            "score_function": {"name": "softmax", "temperature": 2.0},
        }
    )
    assert found.router.capacity.name == "none"
    assert found.router.score_function.name == "softmax"
    assert found.router.selector.options.k == 3


def test_losses_are_added_to_the_presets() -> None:
    found = moe(router="own", losses={"z_loss": 1, "switch_balance": {"weight": 0.1}}).losses
    assert found["z_loss"].options.weight == 1
    assert (found["switch_balance"].options.weight, found["switch_balance"].options.first_choice) == (
        0.1,
        True,
    )
    assert set(moe(router="own", losses={"z_loss": "none"}).losses) == {"switch_balance"}
    assert moe(router="own", losses="none").losses == {}


def test_a_loss_that_is_none_must_be_one() -> None:
    assert moe(router="own", losses={"load": "none"}) == moe(router="own")
    with pytest.raises(UserError, match="moe.losses: unknown loss 'zlos'; did you mean 'z_loss'?"):
        moe(router="own", losses={"zlos": "none"})


def test_a_preset_may_have_losses_under_other_keys() -> None:
    tree = {"losses": {"far": {"name": "switch_balance", "first_choice": True}}}
    registry.register_preset("far", tree, "these tests")
    options = moe(router="far", losses={"far": 0.5}).losses["far"].options
    assert (options.weight, options.first_choice) == (0.5, True)
    assert moe(router="far", losses={"far": "none"}).losses == {}
    replaced = moe(router="far", losses={"far": {"name": "z_loss"}}).losses["far"]
    assert (replaced.name, replaced.options.weight) == ("z_loss", 0.001)


def test_an_option_without_a_name_belongs_to_the_stages_default() -> None:
    tree = {"router": {"selector": {"k": 3}}, "losses": "none"}
    registry.register_preset("bare", tree, "these tests")
    assert moe(router="bare").router.selector.options.k == 3
    for mine in ({"scale": 2.0}, {"name": "top_k", "scale": 2.0}):
        selector = moe(router={"preset": "bare", "selector": mine}).router.selector
        assert (selector.name, selector.options.k, selector.options.scale) == ("top_k", 3, 2.0)
    assert set(moe(router="bare", losses={"z_loss": 0.1}).losses) == {"z_loss"}


def test_a_preset_may_build_on_another() -> None:
    tree = {
        "router": {"preset": "own", "selector": {"k": 2}},
        "losses": {"z_loss": "none", "entropy_x": {"name": "switch_balance"}},
    }
    registry.register_preset("upper", tree, "these tests")
    registry.register_preset("alias", {"router": "upper"}, "tests")
    for name in ("upper", "alias"):
        found = moe(router={"preset": name, "scorer": {"jitter": 0.5}})
        assert (found.router.selector.options.k, found.router.selector.options.scale) == (2, 2.0)
        assert (found.router.scorer.options.jitter, found.num_shared_experts) == (0.5, 2)
        assert set(found.losses) == {"switch_balance", "entropy_x"}
    assert set(moe(router="upper", losses={"z_loss": None}).losses) == {"switch_balance", "entropy_x"}
    assert moe(router="upper", losses={"z_loss": 1}).losses["z_loss"].options.weight == 1


def test_other_keys_of_the_section_are_the_users_first() -> None:
    assert moe(router="own").num_shared_experts == 2
    assert moe(router="own", num_shared_experts=1).num_shared_experts == 1


def test_on_the_command_line() -> None:
    config = load_config(
        None, ["moe.router=own", "moe.router.selector.k=1", "moe.router.selector.weights=raw"]
    )
    assert config.moe.router.selector.options.k == 1
    assert config.moe.router.scorer.options.jitter == 0.25


def test_an_unknown_preset_names_the_nearest() -> None:
    message = r"^configuration: moe.router: unknown preset 'owm'; did you mean 'own'\?"
    with pytest.raises(UserError, match=message):
        moe(router="owm")


def test_the_same_name_twice_is_refused() -> None:
    registry.register_preset("own", TREE, "these tests")
    with pytest.raises(ValueError, match="preset 'own' is registered twice"):
        registry.register_preset("own", {}, "another")


@pytest.mark.parametrize("name", registry.list_presets())
def test_every_preset_parses_and_its_dump_reads_back_equal(name: str) -> None:
    config = parse_config({"moe": {"router": name, "num_experts": 16}})
    assert isinstance(config, RunConfig)
    assert parse_config({"moe": registry.get_preset(name).tree | {"num_experts": 16}}) == config
    assert parse_config(yaml.safe_load(dump_yaml(config))) == config
