"""Every mistake in a configuration is one line: key, value, what was expected, the nearest choice."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.config import RunConfig, load_config
from megamoe.errors import ConfigError, UserError

Load = Callable[..., RunConfig]


def message_of(load: Load, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 900
    return message


MISTAKES = """
modle: {}
    unknown key 'modle'; did you mean 'model'? (known: checkpoint, data,
model: {hiden_size: 3}
    model: unknown key 'hiden_size'; did you mean 'hidden_size'?
log: {wandb: {projct: x}}
    log.wandb: unknown key 'projct'; did you mean 'project'?
moe: {router: {selektor: top_k}}
    moe.router: unknown key 'selektor'; did you mean 'selector'?
train: {batch_rampup: {strt: 1}}
    train.batch_rampup: unknown key 'strt'; did you mean 'start'?
data: {sources: [a, {pth: b}]}
    data.sources.1: unknown key 'pth'; did you mean 'path'? (known:
data: {validation: {a: [{wieght: 1}]}}
    data.validation.a.0: unknown key 'wieght'; did you mean
model: {xyz: 3}
    model: unknown key 'xyz' (known: activation,
1: 2
    unknown key '1' (known:
train: {batch_rampup: {start: 1, samples: 4}}
    train.batch_rampup.increment: this key is required
model: {num_layers: '4'}
    model.num_layers: expected a whole number, found '4'
model: {num_layers: 4.5}
    model.num_layers: expected a whole number, found 4.5
model: {num_layers: true}
    model.num_layers: expected a whole number, found true
model: {num_layers: }
    model.num_layers: expected a whole number, found null
model: {bias: 1}
    model.bias: expected true or false, found 1
optimizer: {lr: abc}
    optimizer.lr: expected a number, found 'abc'
optimizer: {lr: .nan}
    optimizer.lr: expected a finite number, found NaN
optimizer: {lr: .inf}
    optimizer.lr: expected a finite number, found Infinity
name: 3
    name: expected text, found 3
data: {split: a}
    data.split: expected a list, found 'a'
moe: {router: 7}
    moe.router: expected a mapping, found 7
model:
    model: expected a mapping, found null
data: {validation: [a]}
    data.validation: expected a mapping, found ["a"]
model: {num_layers: 0}
    model.num_layers: expected a number above 0, found 0
seed: -1
    seed: expected a number of at least 0, found -1
optimizer: {beta1: 1.0}
    optimizer.beta1: expected a number below 1.0, found 1.0
moe: {layers: {at: [1, 0]}}
    moe.layers.at.1: expected a number above 0, found 0
optimizer: {schedule: cosin}
    optimizer.schedule: expected 'cosine', 'linear', 'inverse_sqrt', 'wsd' or 'constant', found 'cosin'; did
moe: {router: {scorer: liner}}
    moe.router.scorer: unknown scorer 'liner'; did you mean 'linear'?
moe: {losses: {zloss: 1}}
    moe.losses.zloss: unknown loss 'zloss'; did you mean 'z_loss'?
moe: {router: {masks: [x]}}
    moe.router.masks.0: unknown mask 'x' (
moe: {router: {selector: {name: top_k, kk: 2}}}
    moe.router.selector: the selector 'top_k' has no option 'kk'; did you mean 'k'? (known: k, renorm
moe: {router: {capacity: {factor: 1}}}
    moe.router.capacity: the capacity 'none' has no option 'factor' (there are none)
moe: {losses: {z_loss: {wieght: 1}}}
    moe.losses.z_loss: the loss 'z_loss' has no option 'wieght'; did you mean 'weight'? (known: weight)
moe: {router: {selector: {k: '2'}}}
    moe.router.selector.k: expected a whole number, found '2'
moe: {router: {selector: {k: true}}}
    moe.router.selector.k: expected a whole number, found true
moe: {losses: {z_loss: {weight: a}}}
    moe.losses.z_loss.weight: expected a number, found 'a'
moe: {losses: {z_loss: .nan}}
    moe.losses.z_loss.weight: expected a finite number, found NaN
moe: {router: {selector: {weights: row}}}
    moe.router.selector.weights: expected 'raw', 'renormalised', 'kept_softmax' or 'one', found 'row'; did
moe: {expert_ffn_hidden_size: [64, 128]}
    moe.expert_ffn_hidden_size: found [64, 128], but all experts of a layer have one size; give one whole
moe: {expert_ffn_hidden_size: '64'}
    moe.expert_ffn_hidden_size: expected a whole number, found '64'
moe: {expert_activation: glu}
    moe.expert_activation: expected 'swiglu', 'geglu', 'reglu', 'gelu', 'relu' or 'swiglu_clamped', found
moe: {router: {selector: 3}}
    moe.router.selector: expected the name of a selector, or a mapping with `name`, found 3
moe: {router: {selector: {name: [1]}}}
    moe.router.selector: expected the name of a selector, or a mapping with `name`, found {"name": [1]}
moe: {router: {masks: [{k: 1}]}}
    moe.router.masks.0: expected the name of a mask, or a mapping with `name`, found {"k": 1}
moe: {router: {masks: x}}
    moe.router.masks: expected a list, found 'x'
moe: {losses: [z_loss]}
    moe.losses: expected a mapping, found ["z_loss"]
moe: {losses: {z_loss: true}}
    moe.losses.z_loss.weight: expected a number, found true
moe: {losses: {z_loss: [1]}}
    moe.losses.z_loss.weight: expected a number, found [1]
moe: {router: {masks: }}
    moe.router.masks: expected a list, found null
moe: {router: moec, losses: {clusterng: none}}
    moe.losses: unknown loss 'clusterng'; did you mean 'clustering'?
moe: {losses: {laod: none}}
    moe.losses: unknown loss 'laod'; did you mean 'load'?
moe: {router: {preset: [moec]}}
    moe.router.preset: expected the name of a preset, found ["moec"]; options of its parts stand beside it,
moe: {router: {preset: {name: moec}}}
    moe.router.preset: expected the name of a preset, found {"name": "moec"}; options of its parts stand
moe: {router: {preset: }}
    moe.router.preset: expected the name of a preset, found null; options
moe: {losses: {switch_balance: {name: z_loss}}}
    moe.losses: 'switch_balance' is itself a loss, but its name says 'z_loss'; choose another key
moe: {losses: {Far: {name: z_loss}}}
    moe.losses: a loss is logged as train/<its key>: 'Far' is no name for one
moe: {losses: {lr: {name: z_loss}}}
    moe.losses: a loss is logged as train/<its key>: 'lr' is no name for one
moe: {losses: {far: {name: zloss}}}
    moe.losses.far: unknown loss 'zloss'; did you mean 'z_loss'?
"""


def pairs_of(table: str) -> list[tuple[str, str]]:
    """YAML, and under it how the message begins after the file's name."""
    lines = table.strip().split("\n")
    return [(text, message.strip()) for text, message in zip(lines[::2], lines[1::2], strict=True)]


@pytest.mark.parametrize(("text", "expected"), pairs_of(MISTAKES))
def test_wrong_values_and_keys(load: Load, tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).startswith(f"{tmp_path / 'run.yaml'}: {expected}")
    assert caught.value.args == (message_of(load, text),)  # one mistake, one line


def test_several_mistakes_are_as_many_lines(load: Load, tmp_path: Path) -> None:
    text = "seed: -1\nmodel: {hiden_size: 3, num_layers: a}\nmoe: {router: {masks: [x], scorer: liner}}"
    with pytest.raises(ConfigError) as caught:
        load(text, "seed=-2")
    beginnings = [
        f"{tmp_path / 'run.yaml'}: model: unknown key 'hiden_size'",
        "command line: seed: expected a number of at least 0, found -2",
        f"{tmp_path / 'run.yaml'}: model.num_layers: expected a whole number, found 'a'",
        f"{tmp_path / 'run.yaml'}: moe.router.scorer: unknown scorer 'liner'",
        f"{tmp_path / 'run.yaml'}: moe.router.masks.0: unknown mask 'x'",
    ]
    assert [line[: len(it)] for line, it in zip(caught.value.args, beginnings, strict=True)] == beginnings
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo", "override 'foo': expected section.key=value, such as optimizer.lr=1e-4"),
        ("=1", "override '=1': expected section.key=value"),
        ("moe..x=1", "override 'moe..x=1': expected section.key=value"),
        ("seed=[", "override 'seed=[': '[' is not a YAML value"),
        ("name.x=1", "override 'name.x=1': name is 'n', which has no keys"),
        (
            "moe.router.preset.selector.k=2",
            "override 'moe.router.preset.selector.k=2': moe.router.preset is 'switch', which has no keys; "
            "options of its parts stand beside it: moe.router.selector.k=2",
        ),
        ("data.sources.0.weight=2", "override 'data.sources.0.weight=2': data.sources is [\"a\"], which has"),
    ],
)
def test_overrides_that_cannot_be_applied(load: Load, override: str, expected: str) -> None:
    assert message_of(load, "name: n\ndata: {sources: [a]}\nmoe: {router: switch}", override).startswith(
        expected
    )


def test_a_part_that_resembles_none_may_be_of_a_plugin(load: Load) -> None:
    hint = "one of your own needs its file in plugins"
    assert message_of(load, "moe: {router: {scorer: qqq}}").endswith(f"); {hint}")
    assert hint not in message_of(load, "moe: {router: {scorer: liner}}")


def test_an_override_is_checked_as_the_file_is(load: Load) -> None:
    message = "command line: optimizer.lr: expected a number, found 'fast'"
    assert message_of(load, "", "seed=3", "optimizer.lr=fast", "model.num_layers=2") == message
    assert message_of(load, "", "optimizr.lr=1").startswith(
        "command line: unknown key 'optimizr'; did you mean 'optimizer'?"
    )
    option = "moe.router.selector: the selector 'top_k' has no option 'kk'; did you mean 'k'?"
    for text, override, cause in (
        ("", "moe.router.selector.kk=2", "command line"),
        ("moe: {router: {selector: {kk: 2}}}", "moe.router.selector.k=3", "run.yaml"),
    ):
        assert f"{cause}: {option}" in message_of(load, text, override)
    assert ": moe.losses: unknown loss 'laod'; did you mean 'load'?" in message_of(
        load, "", "moe.losses.laod=none"
    )
    assert ": moe.router.preset: expected the name of a preset, found " in message_of(
        load, "", "moe.router.preset.selector.k=2"
    )
    with pytest.raises(UserError, match="^command line: seed: expected a whole number, found 'x'$"):
        load_config(None, ["seed=x"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  a: [1\nb: 2", " line 3 is not valid YAML: expected ',' or ']', but got ':'"),
        ("\tx: 1", " line 1 is not valid YAML: found character '\\t'"),
        ("seed: 1\nmodel: {}\nmodel: {}", " line 3 is not valid YAML: the key 'model' stands twice"),
        ("? [1, 2]\n: 3", " line 1 is not valid YAML: expected text as a key"),
        (
            "!!python/object/apply:os.getcwd []",
            " line 1 is not valid YAML: the tag !!python/object/apply:os.getcwd is not read",
        ),
        ("- a", ': expected a mapping of sections, found ["a"]'),
        ("3", ": expected a mapping of sections, found 3"),
    ],
)
def test_files_that_are_no_configuration(load: Load, tmp_path: Path, text: str, expected: str) -> None:
    assert message_of(load, text).startswith(f"--config: {tmp_path / 'run.yaml'}{expected}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^--config: cannot read '.*/none.yaml': No such file or directory$"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="^--config: cannot read '.*': Is a directory$"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary.yaml is not valid YAML: not UTF-8 text$"):
        load_config(tmp_path / "binary.yaml")


def test_the_end_of_the_longer_messages(load: Load) -> None:
    assert message_of(load, "optimizer: {schedule: cosin}").endswith("; did you mean 'cosine'?")
    message = message_of(load, "moe: {router: {selector: {k: 3, second: random}}}")
    assert message.endswith('found k: 3; set second: best (found {"k": 3, "second": "random"})')


def test_a_long_value_is_shortened(load: Load) -> None:
    message = message_of(load, f"model: {{num_layers: {list(range(100))}}}")
    assert ": expected a whole number, found [0, 1, 2, 3, " in message
    assert message.endswith(", 21, 2...")


def test_an_unknown_key_is_reported_before_a_missing_key(load: Load) -> None:
    message = message_of(load, "train: {batch_rampup: {start: 1, incremnt: 1, samples: 1}}")
    assert "unknown key 'incremnt'; did you mean 'increment'?" in message
