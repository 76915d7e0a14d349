"""`moe.groups`: what each layer's configuration is, and which groups are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from megamoe.config import RunConfig, parse_config, to_dict
from megamoe.config.layer_kinds import config_by_layer, experts_by_layer, kinds, ranges
from megamoe.errors import UserError
from megamoe.model.size import block_flops, model_flops, model_size
from megamoe.model.stage import stage_sizes
from megamoe.registry import register_preset
from megamoe.validation.run import section_problems
from tests.support.refusals import Case, cases
from tests.support.tiny import VOCABULARY, tiny, tiny_model

MODEL: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
}
MOE: dict[str, Any] = {
    "layers": {"every": 1},
    "num_experts": 8,
    "num_shared_experts": 1,
    "router": {
        "score_function": {"name": "sigmoid", "bias_update": 0.01},
        "selector": {"k": 3, "weights": "raw"},
    },
    "losses": {"switch_balance": 0.1},
}
GROUPED = (
    "model.num_layers=4",
    "moe.groups=[{layers: [1], num_experts: 8, expert_ffn_hidden_size: 20, num_shared_experts: 2, "
    "router: hash}, {layers: last 1, num_experts: 2, expert_activation: relu, losses: {z_loss: 0.1}, "
    "frozen: [experts]}]",
)


def run_with(*groups: Any, model: Any = None, **moe: Any) -> RunConfig:
    data = {"mock": True, "sequence_length": 8}
    return parse_config(
        {"model": {**MODEL, **(model or {})}, "data": data, "moe": {**MOE, **moe, "groups": list(groups)}}
    )


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([1, 4], [1, 4]),
        ("first 2", [1, 2]),
        ("last 3", [4, 5, 6]),
        ({"every": 2}, [2, 4, 6]),
        ({"first": 1, "at": [3], "last": 1}, [1, 3, 6]),
    ],
)
def test_layers_are_named_by_blocks(layers: Any, expected: list[int]) -> None:
    assert kinds(run_with({"layers": layers, "num_experts": 4}))[-1].layers == expected


def test_first_and_last_count_moe_layers_inserted_ones_too() -> None:
    places = {"every": 3, "insert_after": [4]}
    for layers, expected in (("first 2", [3, 4]), ("last 2", [4, 6])):
        config = run_with({"layers": layers, "num_experts": 4}, layers=places)
        assert kinds(config)[-1].layers == expected


def test_a_group_replaces_keys_and_stages_and_keeps_the_others() -> None:
    config = run_with(
        {"layers": [2], "num_experts": 16, "router": {"selector": {"k": 1}}},
        {"layers": [3], "router": {"selector": "threshold"}, "losses": {"z_loss": 0.1}},
        {"layers": [4], "router": "hash"},
        {"layers": [5], "router": {"preset": "switch"}, "losses": {"z_loss": 0.2}},
    )
    moe = {number: each.moe for number, each in config_by_layer(config).items()}
    assert experts_by_layer(config) == [8, 16, 8, 8, 8, 8]
    assert moe[2].router.selector.options.k == 1 and moe[2].router.selector.options.weights == "raw"
    assert moe[2].router.score_function == moe[1].router.score_function
    assert [list(moe[n].losses) for n in (1, 2, 3, 4, 5)] == [
        *[["switch_balance"]] * 2,
        ["z_loss"],
        [],  # the preset's, not those of moe
        ["switch_balance", "z_loss"],
    ]
    assert (moe[4].router.selector.name, moe[4].router.score_function.name) == ("table", "softmax")
    assert {each.num_shared_experts for each in moe.values()} == {1}
    assert [kind.key for kind in kinds(config)] == ["moe", *(f"moe.groups[{n}]" for n in range(4))]
    assert to_dict(parse_config(to_dict(config))) == to_dict(config)


def test_without_groups_there_is_one_kind_the_configuration_itself() -> None:
    config = tiny()
    (kind,) = kinds(config)
    assert kind.config is config and kind.layers == [1, 2] and kind.place("moe.losses") == "moe.losses"


def test_a_preset_can_have_groups(own_registry: None) -> None:
    tree = {"router": {"selector": "top_k"}, "groups": [{"layers": "first 1", "num_experts": 32}]}
    register_preset("grouped_for_a_test", tree, "this test")
    moe = {**MOE, "router": {"preset": "grouped_for_a_test", "selector": {"k": 2}}}
    config = parse_config({"model": MODEL, "moe": moe})
    assert experts_by_layer(config) == [32, 8, 8, 8, 8, 8]
    assert {each.moe.router.selector.options.k for each in config_by_layer(config).values()} == {2}


def test_layers_of_multi_token_prediction_follow_the_last_block() -> None:
    model = {"multi_token_prediction": {"depth": 2}}
    config = run_with({"layers": "last 1", "num_experts": 16}, model=model)
    assert experts_by_layer(config) == [8, 8, 8, 8, 8, 16, 16, 16]


def test_an_encoder_decoder_names_the_layers_of_each_stack() -> None:
    group = {"layers": {"encoder": "first 1", "decoder": [2]}, "num_experts": 4}
    model = {"architecture": "encoder_decoder", "num_layers": 2, "encoder_layers": 3}
    config = run_with(group, model=model, layers={"encoder": {"every": 1}, "decoder": {"every": 1}})
    assert experts_by_layer(config) == [4, 8, 8, 8, 4]


@pytest.mark.parametrize("case", cases("layer_kinds"))
def test_nonsense_is_refused_with_its_key(case: Case, expect_message: Callable[..., None]) -> None:
    try:
        config = run_with(*case["groups"], **case.row.get("moe", {}))
        problems = [str(problem) for problem in section_problems(config, 1, None)]
    except UserError as error:
        problems = [str(error)]
    expect_message(case, problems)


def test_expert_parallelism_divides_the_experts_of_every_group() -> None:
    config = run_with({"layers": [2], "num_experts": 6, "router": {"selector": {"k": 1}}})
    config.parallel.expert = 4
    found = [str(problem) for problem in section_problems(config, 4, None)]
    assert any("4 does not divide moe.groups[0].num_experts 6; legal on 4 ranks" in it for it in found), found


def test_sizes_are_those_of_the_model(one_rank: None) -> None:
    config = tiny(*GROUPED)
    size, model = model_size(config, VOCABULARY), tiny_model(config)
    layers = dict(model.moe_layers())
    assert size.total == sum(weight.numel() for weight in model.parameters())
    routed = {n: sum(weight.numel() for weight in layer.experts.parameters()) for n, layer in layers.items()}
    assert (size.expert, size.frozen) == (sum(routed.values()), routed[4])
    assert [layer.num_experts for layer in layers.values()] == [8, 4, 4, 2]
    assert [sorted(layer.losses) for layer in layers.values()] == [[], [], [], ["z_loss"]]


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_parameters_of_all_stages_are_those_of_the_model(position: str) -> None:
    """Learned positions and the final norm are on one stage, and neither is split by tensor parallelism."""
    untied = ("model.tie_embeddings=false", f"model.position={position}", "model.num_layers=4")
    whole = model_size(tiny(*untied), VOCABULARY)
    stages = stage_sizes(tiny(*untied, "parallel.pipeline=2"), VOCABULARY)
    for name in ("total", "active", "tensor_sharded"):
        assert sum(getattr(stage, name) for stage in stages) == getattr(whole, name), name


def test_stages_and_flops_of_blocks_follow_their_groups() -> None:
    config = tiny(*GROUPED, "parallel.pipeline=2", "parallel.blocks_per_stage=[1, 3]")
    first, second = stage_sizes(config, VOCABULARY)
    whole = model_size(config, VOCABULARY)
    assert first.expert + second.expert == whole.expert and (first.frozen, second.frozen) == (0, whole.frozen)
    alone = tiny("moe.num_experts=8", "moe.expert_ffn_hidden_size=20", "moe.num_shared_experts=2")
    assert first.expert == model_size(alone, VOCABULARY).expert / 2
    blocks, _ = block_flops(config, VOCABULARY)
    plain, _ = block_flops(tiny("model.num_layers=4"), VOCABULARY)
    assert blocks[1:3] == plain[1:3] and blocks[0] != plain[0] and blocks[3] < plain[3]
    flops = model_flops(config, VOCABULARY)
    assert flops.by_layer == {1: 3 * 2 * 16 * 60, 2: 3 * 2 * 16 * 36, 3: 3 * 2 * 16 * 36, 4: 3 * 2 * 16 * 24}
    assert flops.of_step(0, {1: 1, 4: 2}) == 3 * 2 * 16 * (60 + 2 * 24)


def test_ranges_are_short() -> None:
    assert ranges([8, 1, 2, 3, 5, 6]) == "1 to 3, 5, 6, 8"
