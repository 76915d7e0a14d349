"""Reading the YAML and its overrides: defaults, numbers, shorthands, the round trip."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megamoe.config import PartChoice, RunConfig, dump_yaml, load_config, parse_config, to_dict
from megamoe.config.schema import SourceConfig
from megamoe.errors import UserError
from megamoe.moe.losses.z_loss import ZLoss
from megamoe.moe.selectors.top_k import TopK

Load = Callable[..., RunConfig]
Z_LOSS, BALANCE = "moe.losses.z_loss", "moe.losses.switch_balance"
TWO = "moe: {losses: {near: {name: switch_balance, scope: sequence}, far: {name: switch_balance, weight: 1}}}"


def value_at(config: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        config = config[key] if isinstance(config, dict) else getattr(config, key)
    return config


def test_an_override_changes_one_alias_of_an_anchor(load: Load) -> None:
    text = "moe: {losses: {switch_balance: &w {weight: 0.01}, z_loss: *w}}"
    losses = load(text, "moe.losses.z_loss.weight=0.5").moe.losses
    weights = {name: loss.options.weight for name, loss in losses.items()}
    assert weights == {"switch_balance": 0.01, "z_loss": 0.5}


def test_an_empty_file_gives_the_defaults(load: Load) -> None:
    config = load("")
    assert config == load_config(None) == parse_config({}) == RunConfig()
    assert config.moe.router.selector == PartChoice("selector", "top_k", TopK.Config(k=2))
    assert (config.moe.router.score_function.name, config.moe.router.capacity.name) == ("softmax", "none")
    assert (config.moe.losses, config.moe.layers.every, config.moe.num_experts) == ({}, None, 8)


def test_two_configurations_share_nothing(load: Load) -> None:
    load("").data.sources.append("x")  # type: ignore[arg-type]
    assert load("").data.sources == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-4", 1e-4), ("2.5E-3", 2.5e-3), ("1e3", 1000.0), (".5e1", 5.0), ("+1.e+2", 100.0), ("3", 3.0)],
)
def test_numbers_with_exponents_are_numbers(load: Load, text: str, expected: float) -> None:
    for config in (load(f"optimizer: {{lr: {text}}}"), load("", f"optimizer.lr={text}")):
        assert config.optimizer.lr == expected
        assert isinstance(config.optimizer.lr, float)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("seed=7", "seed", 7),
        ("model.bias=true", "model.bias", True),
        ("name=a=b", "name", "a=b"),
        ("moe.router.selector.k=4", "moe.router.selector.options.k", 4),
        ("moe.router.score_function=sigmoid", "moe.router.score_function.name", "sigmoid"),
        ("moe.router.scorer.jitter=0.1", "moe.router.scorer.options.jitter", 0.1),
        ("moe.router.capacity={name: per_expert, factor: 2}", "moe.router.capacity.options.factor", 2.0),
        ("moe.layers=none", "moe.layers.every", None),
        ("moe.layers.every=3", "moe.layers.every", 3),
        ("moe.losses.z_loss=0.2", "moe.losses.z_loss.options.weight", 0.2),
        ("moe.losses.z_loss.weight=0.3", "moe.losses.z_loss.options.weight", 0.3),
        ("moe.losses.switch_balance.first_choice=true", "moe.losses.switch_balance.options.weight", 0.01),
        ("moe.losses=none", "moe.losses", {}),
        ("data.split=[0.5, 0.5, 0]", "data.split", [0.5, 0.5, 0]),
        ("log.wandb.tags=[a, b]", "log.wandb.tags", ["a", "b"]),
        ("moe.num_shared_experts=2", "moe.num_shared_experts", 2),
        ("train.batch_rampup={start: 1, increment: 1, samples: 9}", "train.batch_rampup.samples", 9),
    ],
)
def test_overrides(load: Load, override: str, key: str, expected: object) -> None:
    text = "moe: {layers: {every: 2}, router: {selector: top_k, scorer: linear}, losses: {z_loss: 0.1}}"
    assert value_at(load(text, override), key) == expected


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("name: 1e4x", (), {"name": "1e4x"}),
        ("name: '1e4'", (), {"name": "1e4"}),
        # The language no (Norwegian) is a name; PyYAML's keys would be False and None.
        ("data: {validation: {no: [], null: []}}", (), {"data.validation": {"no": [], "null": []}}),
        ("data: {sources: one}", (), {"data.sources": [SourceConfig("one")]}),
        (
            "data: {sources: [a, {path: b, weight: 2}], validation: {code: c, web: [{path: d}]}}",
            (),
            {
                "data.sources": [SourceConfig("a"), SourceConfig("b", 2.0)],
                "data.validation": {"code": [SourceConfig("c")], "web": [SourceConfig("d")]},
            },
        ),
        (
            "data: {validation: {a: [&web {path: w, weight: 2}], b: [{<<: *web, path: v}]}}",
            (),
            {"data.validation.b": [SourceConfig("v", 2.0)]},
        ),
        (
            "moe: {router: {selector: {k: 4, scale: 2.0}}}",
            ("moe.router.selector.k=3",),
            {"moe.router.selector.options": TopK.Config(k=3, scale=2.0)},
        ),
        ("moe: {layers: none}", ("moe.layers.every=2",), {"moe.layers.every": 2}),
        ("", ("seed=1", "seed=2"), {"seed": 2}),
        (
            "train: {objective: masked}",
            ("train.objective.unit=word",),
            {"train.objective.name": "masked", "train.objective.options.unit": "word"},
        ),
        ("moe: {losses: {z_loss: 1}}", (), {Z_LOSS: PartChoice("loss", "z_loss", ZLoss.Config(weight=1.0))}),
        ("moe: {losses: {z_loss: }}", (), {f"{Z_LOSS}.options": ZLoss.Config()}),
        (
            "moe: {losses: {switch_balance: {weight: 0.5, first_choice: true}}}",
            (),
            {f"{BALANCE}.options.weight": 0.5, f"{BALANCE}.options.first_choice": True},
        ),
        ("moe: {losses: {z_loss: 0.1}}", ("moe.losses.z_loss=none",), {"moe.losses": {}}),
        (
            "",
            ("moe.losses.z_loss=none", "moe.losses.z_loss.weight=2"),
            {f"{Z_LOSS}.options": ZLoss.Config(weight=2.0)},
        ),
        ("moe: {losses: }", (), {"moe.losses": {}}),
        ("moe: {router: moec, losses: none}", (), {"moe.losses": {}}),
        ("moe: {router: {capacity: null}}", (), {"moe.router.capacity.name": "none"}),
    ],
)
def test_shorthands_and_overrides(load: Load, text: str, overrides: tuple[str, ...], expected: Any) -> None:
    config = load(text, *overrides)
    assert {key: value_at(config, key) for key in expected} == expected


def test_a_pattern_of_sources_is_written_out(load: Load, tmp_path: Path) -> None:
    for name in ("fr.idx", "de.idx", "de.bin", "de.card.json", "notes.txt"):
        (tmp_path / name).write_text("")
    config = load(f"data: {{sources: ['{tmp_path}/*', other], validation: {{german: ['{tmp_path}/d*']}}}}")
    assert [source.path for source in config.data.sources] == [f"{tmp_path}/de", f"{tmp_path}/fr", "other"]
    assert [source.path for source in config.data.validation["german"]] == [f"{tmp_path}/de"]
    (french,) = load(f"data: {{sources: [{{path: '{tmp_path}/f*', weight: 2}}]}}").data.sources
    assert (french.path, french.weight) == (f"{tmp_path}/fr", 2.0)
    with pytest.raises(UserError, match=r"data.sources: '.*/x\*' names no prepared dataset"):
        load(f"data: {{sources: '{tmp_path}/x*'}}")


def test_the_mapping_that_is_read_is_left_as_it_was() -> None:
    tree = {"moe": {"layers": "none", "losses": {"z_loss": 1.0}}, "data": {"sources": ["a"]}}
    parse_config(tree)
    assert tree == {"moe": {"layers": "none", "losses": {"z_loss": 1.0}}, "data": {"sources": ["a"]}}


def test_masks_of_a_preset_may_be_none(load: Load) -> None:
    assert load("moe: {router: moec}").moe.router.masks
    assert load("moe: {router: {preset: moec, masks: none}}").moe.router.masks == []
    assert load("moe: {router: moec}", "moe.router.masks=none").moe.router.masks == []


def test_a_loss_may_occur_twice_under_different_keys(load: Load) -> None:
    config = load(TWO, "moe.losses.far.weight=0.5")
    losses = config.moe.losses
    assert [choice.name for choice in losses.values()] == ["switch_balance"] * 2
    assert (losses["near"].options.scope, losses["far"].options.scope) == ("sequence", "micro_batch")
    assert losses["far"].options.weight == 0.5
    assert load(dump_yaml(config)) == config
    assert set(load(TWO, "moe.losses.far=none").moe.losses) == {"near"}


def test_an_empty_section_of_losses_changes_nothing(load: Load) -> None:
    for losses in ("losses: ", "losses: {clustering: , switch_balance: }"):
        assert load(f"moe: {{router: moec, {losses}}}").moe == load("moe: {router: moec}").moe


FULL = """
name: full
plugins: []
data: {sources: [a, {path: b, weight: 2}], validation: {code: c}, split: [1, 0, 0]}
moe:
  layers: {at: [1, 3]}
  router:
    scorer: {jitter: 0.01}
    score_function: {name: sigmoid, temperature: 2}
    selector: {k: 1, weights: raw, scale: 1.5}
    capacity: {name: per_expert, factor: 1.5, eval_factor: 2, priority: probability}
  losses: {z_loss: 0.1, switch_balance: {first_choice: true}}
optimizer: {lr: 1e-4, min_lr: 1e-5}
train: {batch_rampup: {start: 1, increment: 2, samples: 30}, exit_after_minutes: 1.5}
log: {wandb: {tags: ["1e3", "true", "null"]}}
"""


def test_the_dump_reads_back_equal(load: Load) -> None:
    config = load(FULL)
    assert load(dump_yaml(config)) == config
    assert parse_config(to_dict(config)) == config
    assert load(dump_yaml(load(""))) == load("")


def test_the_dump_names_every_key(load: Load) -> None:
    """A run's stored configuration must not depend on the defaults of a later version."""

    def check(node: Any, tree: Any) -> None:
        if isinstance(node, PartChoice):
            assert tree == {"name": node.name, **dataclasses.asdict(node.options)}
        elif dataclasses.is_dataclass(node):
            assert list(tree) == [field.name for field in dataclasses.fields(node)]
            for key in tree:
                check(getattr(node, key), tree[key])

    config = load(FULL)
    check(config, yaml.safe_load(dump_yaml(config)))


def test_paths_are_as_a_shell_writes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`~` is the user's folder, and a dataset may have the ending of one of its files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus.idx").touch()
    data = "data={sources: [~/corpus.bin, '~/*.bin'], validation: {held: ~/corpus.idx}}"
    config = load_config(None, [data, "output=~/runs"])
    assert [source.path for source in config.data.sources] == [str(tmp_path / "corpus")] * 2
    assert config.data.validation["held"][0].path == str(tmp_path / "corpus")
    assert config.output == str(tmp_path / "runs")


def test_keys_that_are_gone_may_be_off(load: Load) -> None:
    """Runs of before wrote them into their config.yaml and their checkpoints."""
    off = "noise_scale_every: 0, attention_logits_every: 0, gradient_shares_every: 0, heat_map_every: 100"
    assert load(f"log: {{{off}}}\noptimizer: {{qk_clip: null, lr: 0.5}}").optimizer.lr == 0.5
    with pytest.raises(UserError, match="log: unknown key 'noise_scale_every'; here it is train.global"):
        load("log: {noise_scale_every: 5}")
