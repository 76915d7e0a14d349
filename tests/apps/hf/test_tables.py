"""The tables of the classes: each element of ours has one place, and defaults are those of transformers."""

import copy
import json
from typing import Any

import pytest
import torch

from megamoe.apps.hf.families import FAMILIES
from megamoe.apps.hf.family import Family, as_config, differences
from megamoe.apps.hf.keys import REQUIRED
from megamoe.apps.hf.rules import BlockMapping, flat
from megamoe.config.shapes import moe_block_numbers
from tests.support.apps.hf_models import CONFIGS, WORDS

transformers = pytest.importorskip("transformers")
# Keys whose absence means something else than transformers' default, and keys of earlier versions that the
# present classes do not have.
OTHER_DEFAULTS = {
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "moe_layer_end_index",
}
KINDS = [(kind, number) for kind in CONFIGS for number in (0, 1)]
TINY = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
DEFAULT = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def written(kind: str, number: int) -> dict[str, Any]:
    """config.json as transformers writes it."""
    name, *configs = CONFIGS[kind]
    content = json.loads(getattr(transformers, name)(**configs[number]).to_json_string())
    return {**content, "architectures": [FAMILIES[kind].architecture]}


def rules_of(kind: str, number: int) -> list[BlockMapping]:
    family = FAMILIES[kind]
    config = as_config(family.read(written(kind, number)))
    return flat(family.rules(config, int(config.model.vocab_size or 0)))


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_every_element_has_one_place(kind: str, number: int) -> None:
    for rule in rules_of(kind, number):
        times = torch.zeros(rule.shape, dtype=torch.int64)
        for view, shape in rule.views(times).values():
            assert view.numel() == torch.Size(shape).numel(), rule.target
            view.add_(1)
        assert bool((times == 1).all()), rule.target


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_not_given_is_transformers_default(kind: str) -> None:
    theirs = getattr(transformers, CONFIGS[kind][0])()
    for entry in FAMILIES[kind].keys:
        for name, default in entry.defaults.items():
            if default is REQUIRED or name in OTHER_DEFAULTS or not hasattr(theirs, name):
                continue
            found = getattr(theirs, name)
            assert default is None or found == default, name
            assert default is not None or not isinstance(found, bool) or found is False, name


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"rope_parameters": DEFAULT, "rope_scaling": YARN}),
        ("llama", {"rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 700.0}),
        ("llama", {"rope_parameters": DEFAULT, "rope_scaling": {**YARN, "rope_theta": 900.0}}),
        ("llama", {"rope_parameters": DEFAULT, "rope_scaling": None, "rope_theta": 700.0}),
        ("gpt_oss", {"rope_theta": 700.0}),
        ("gpt_oss", {"rope_parameters": {}}),
        ("minimax_m2", {"rotary_dim": 6}),
        ("minimax_m2", {"rotary_dim": 6, "partial_rotary_factor": 1.0}),
        ("minimax_m2", {"rotary_dim": 6, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
        ("minimax_m2", {"rotary_dim": 6, "rope_parameters": DEFAULT}),
    ],
)
def test_rotary_positions_said_twice_are_what_transformers_takes(kind: str, keys: dict[str, Any]) -> None:
    name, shape, _ = CONFIGS[kind]
    content = {**shape, **keys}
    theirs = getattr(transformers, name)(**copy.deepcopy(content)).rope_parameters  # it fills in the given
    ours = as_config(FAMILIES[kind].read(content)).model
    found = ours.rope_base, ours.rotary.share, ours.rotary.scaling.replace("none", "default")
    assert found == (theirs["rope_theta"], theirs.get("partial_rotary_factor", 1.0), theirs["rope_type"])
    if "factor" in theirs:
        assert ours.rotary.factor == theirs["factor"]


@pytest.mark.parametrize("at", [[], [1], [3], [2, 3, 4], [2, 4], [3, 6]])
def test_ernie_says_which_blocks_have_an_moe_layer(at: list[int]) -> None:
    family = FAMILIES["ernie4_5_moe"]
    tree = family.read({**written("ernie4_5_moe", 0), "num_hidden_layers": 6})
    tree["moe"]["layers"] = {"at": at}
    anew = family.write(as_config(tree))
    assert moe_block_numbers(as_config(family.read(anew))) == at
    names = ("num_hidden_layers", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    theirs = transformers.Ernie4_5_MoeConfig(
        **{name: anew[name] for name in names}, **TINY, moe_num_experts=2
    )
    with torch.device("meta"):
        layers = transformers.AutoModel.from_config(theirs).layers
    assert [number for number, layer in enumerate(layers, 1) if hasattr(layer.mlp, "experts")] == at


def test_the_names_of_multi_token_prediction() -> None:
    """Tensors that begin so are left out; {n}: the number of blocks."""
    found = {kind: family.left_out for kind, family in FAMILIES.items() if family.left_out}
    assert found.pop("ernie4_5_moe") == "model.mtp_" and {*found.values()} == {"model.layers.{n}."}
    assert found.keys() == {"glm4_moe", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "hy_v3"}


def test_gpt_oss_without_windows_runs_in_transformers() -> None:
    """It builds the mask of a window even if no block has one."""
    family = FAMILIES["gpt_oss"]
    tree = family.read({**written("gpt_oss", 0), "layer_types": ["full_attention"] * 2})
    anew = family.write(as_config(tree))
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**anew))
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, WORDS)
    assert as_config(family.read(anew)).model.attention.window is None


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_a_config_that_is_written_anew_says_the_same(kind: str, number: int) -> None:
    family: Family = FAMILIES[kind]
    config = as_config(family.read(written(kind, number)))
    anew = family.write(config)
    assert differences(config, as_config(family.read(anew))) == {}
    kwargs = {name: value for name, value in anew.items() if name != "model_type"}
    theirs = json.loads(getattr(transformers, CONFIGS[kind][0])(**kwargs).to_json_string())
    before = written(kind, number)
    differing = {key for key in before.keys() | theirs.keys() if before.get(key) != theirs.get(key)}
    unsaid = {
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_window_layers",
        "head_dim",
    }
    if kind == "ernie4_5_moe":  # the same blocks, said otherwise
        unsaid |= {"moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index"}
    if kind == "deepseek_v2":  # released folders have them, also where the way of choosing does not read them
        unsaid |= {"n_group", "topk_group"}
    if kind == "glm4_moe_lite":  # released folders have it, but transformers' class has no such key
        unsaid.add("num_nextn_predict_layers")
    assert differing <= unsaid | {"sliding_window", "architectures", "decoder_sparse_step", "mlp_only_layers"}
