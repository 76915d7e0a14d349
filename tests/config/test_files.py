"""A run's YAML over its bases: what is merged, what is replaced, and the mistakes."""

from pathlib import Path

import pytest
import yaml

from megamoe.config import RunConfig, load_config, parse_config
from megamoe.config.files import merge
from megamoe.config.shapes import moe_layer_numbers


def loaded(folder: Path, *overrides: str, **texts: str) -> RunConfig:
    """Write NAME.yaml for each text and load the first."""
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return load_config(folder / f"{next(iter(texts))}.yaml", list(overrides))


def test_a_file_goes_over_its_bases_and_theirs(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        "optimizer.eps=1e-7",
        run="base: [one.yaml, two.yaml]\nname: run\noptimizer: {beta1: 0.7}\ndata: {split: [1, 0, 0]}",
        one="base: zero.yaml\nname: one\noptimizer: {lr: 1.0e-3, beta1: 0.5, name: adam}\nseed: 5",
        two="optimizer: {lr: 2.0e-3, grad_clip: 0.1}",
        zero="optimizer: {eps: 1.0e-6, beta2: 0.6}\ndata: {split: [0.5, 0.5, 0], mock: true}",
    )
    optimizer = config.optimizer
    assert (config.name, config.seed, optimizer.name, config.data.mock) == ("run", 5, "adam", True)
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.grad_clip) == (2e-3, 0.7, 0.6, 0.1)
    assert (optimizer.eps, config.data.split) == (1e-7, [1, 0, 0])


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/middle.yaml").write_text("base: ../top.yaml\nname: middle")
    assert loaded(tmp_path, run="base: deeper/middle.yaml", top="seed: 9\nname: top").seed == 9


BASE = """
moe:
  layers: {insert_after: [2]}
  router: {preset: switch, scorer: {jitter: 0.1}, capacity: {factor: 3.0}}
  losses: {switch_balance: 0.5, z_loss: 0.1}
train: {objective: {name: masked, probability: 0.3}}
model: {architecture: encoder}
"""


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("{router: {capacity: {factor: 4.0}}}", {"router": {"capacity": {"factor": 4.0}}}),
        ("{router: {selector: {k: 2}}}", {"router": {"selector": {"k": 2}}}),
        ("{router: {scorer: cosine}}", {"router": {"scorer": "cosine"}}),
        ("{router: {scorer: {name: cosine}}}", {"router": {"scorer": {"name": "cosine"}}}),
        ("{losses: {switch_balance: {first_choice: false}}}", None),
    ],
)
def test_parts_keep_the_options_of_the_base_or_are_replaced(
    tmp_path: Path, text: str, same_as: dict[str, dict[str, object]] | None
) -> None:
    config = loaded(tmp_path, run=f"base: base.yaml\nmoe: {text}", base=BASE).moe
    if same_as is None:
        options = config.losses["switch_balance"].options
        assert (options.weight, options.first_choice, set(config.losses)) == (
            0.5,
            False,
            {"switch_balance", "z_loss"},
        )
        return
    router: dict[str, object] = {"preset": "switch", "scorer": {"jitter": 0.1}, "capacity": {"factor": 3.0}}
    expected = parse_config({"moe": {"router": {**router, **same_as["router"]}}})
    assert config.router == expected.moe.router


@pytest.mark.parametrize(
    ("router", "text", "expected"),
    [
        ("{selector: {k: 4}}", "{name: top_k, weights: raw}", {"k": 4, "weights": "raw"}),
        ("{preset: switch, selector: {scale: 2.0}}", "{name: top_k, k: 3}", {"k": 3, "scale": 2.0}),
        ("{preset: remoe, selector: {mean: 4}}", "{name: above, value: 0.5}", {"mean": 4, "value": 0.5}),
        ("{preset: remoe, selector: {mean: 4}}", "{name: top_k, weights: raw}", {"k": 2, "weights": "raw"}),
        ("{preset: own_plugin, selector: {scale: 2.0}}", "{name: top_k, k: 3}", {"k": 3}),
    ],
)
def test_the_name_of_a_default_keeps_its_options(router: str, text: str, expected: dict[str, object]) -> None:
    """Options without a name are those of the preset's part, or of the default one. Presets of plugins are
    not known here: what the base says of their part is replaced.
    """
    base, mine = ({"moe": {"router": yaml.safe_load(each)}} for each in (router, f"{{selector: {text}}}"))
    merged = merge(base, mine)
    if merged["moe"]["router"].get("preset") == "own_plugin":
        assert merged["moe"]["router"]["selector"] == mine["moe"]["router"]["selector"]
        return
    found = parse_config(merged).moe.router.selector.to_dict()
    assert found["name"] == mine["moe"]["router"]["selector"]["name"]
    assert {key: found[key] for key in expected} == expected


def test_the_name_of_a_loss_and_of_the_objective_keep_their_options(tmp_path: Path) -> None:
    text = "base: base.yaml\nmoe: {losses: {z_loss: {name: z_loss}, switch_balance: {name: switch_balance}}}"
    losses = loaded(tmp_path, run=text, base=BASE).moe.losses
    assert {name: loss.options.weight for name, loss in losses.items()} == {
        "z_loss": 0.1,
        "switch_balance": 0.5,
    }


def test_another_preset_objective_or_place_leaves_nothing_of_the_base(tmp_path: Path) -> None:
    text = "base: base.yaml\nmoe: {layers: {every: 2}, router: {preset: hash}}"
    config = loaded(tmp_path, run=text, base=BASE)
    assert config.moe.router == parse_config({"moe": {"router": "hash"}}).moe.router
    assert moe_layer_numbers(config) == [2, 4]
    spans = loaded(tmp_path, run="base: base.yaml\ntrain: {objective: {unit: span}}", base=BASE)
    assert spans.train.objective.to_dict()["probability"] == 0.3
    dense = loaded(tmp_path, run="base: base.yaml\nmoe: {layers: none}", base=BASE)
    assert moe_layer_numbers(dense) == []
    again = loaded(tmp_path, run="base: dense.yaml\nmoe: {layers: {at: [1]}}", dense="moe: {layers: none}")
    assert moe_layer_numbers(again) == [1]


def test_the_merged_mappings_stay_as_they_were() -> None:
    base, mine = {"a": {"b": [1]}}, {"a": {"c": [2]}}
    merged = merge(base, mine)
    merged["a"]["b"].append(3)
    merged["a"]["c"].append(4)
    assert (base, mine) == ({"a": {"b": [1]}}, {"a": {"c": [2]}})
