"""Sets of blocks whose costs sum to those of a whole model."""

from collections import Counter

import pytest
import yaml

from megamoe.apps.plan.figures import BlockKind, block_kinds, fewer_blocks, is_worth_it, with_blocks
from megamoe.config import RunConfig, load_config
from megamoe.config.layer_kinds import config_by_layer
from megamoe.validation.layer_groups import group_problems
from tests.support.tiny import ROOT

ENCODER_DECODER = ("model.architecture=encoder_decoder", "train.objective=span_corruption")
MODELS: dict[str, list[str]] = yaml.safe_load((ROOT / "tests/snapshots/block_kinds.yaml").read_text())


def experts_by_kind(config: RunConfig) -> dict[BlockKind, int]:
    """The number of experts in an MoE layer of each kind of block."""
    layers = config_by_layer(config)
    numbered = enumerate(block_kinds(config), 1)
    return {kind: layers[number].moe.num_experts for number, kind in numbered if number in layers}


def test_groups_without_a_block_are_left_out() -> None:
    """A pipeline stage may have no layer of a group."""
    config = load_config(None, ["data.mock=true", *MODELS["groups"]])
    smaller = with_blocks(config, [0, 1, 9])
    [group] = smaller.moe.groups
    assert (group.num_experts, group.layers.at) == (64, [3])
    assert not [*group_problems(smaller)]


@pytest.mark.parametrize("name", MODELS)
def test_the_sets_sum_to_the_model(name: str) -> None:
    """Each kind of block counts as often as the model has it, and the whole model once."""
    config = load_config(None, ["data.mock=true", *MODELS[name]])
    terms = fewer_blocks(config)
    found: Counter[BlockKind] = Counter()
    for factor, blocks in terms:
        smaller = with_blocks(config, blocks)
        # The model of these blocks has exactly their kinds, each in its own stack.
        assert block_kinds(smaller) == [block_kinds(config)[block] for block in blocks]
        assert not [*group_problems(smaller)]
        assert experts_by_kind(smaller).items() <= experts_by_kind(config).items()
        for kind in block_kinds(smaller):
            found[kind] += factor
    assert found == Counter(block_kinds(config))
    assert sum(factor for factor, _ in terms) == 1
    lasts = {each.stack: number for number, each in enumerate(block_kinds(config))}
    assert all(set(lasts.values()) <= set(blocks) for _, blocks in terms)


def test_a_model_is_simulated_whole_where_that_is_no_more() -> None:
    """Four kinds of blocks need 24 simulated ones."""
    for blocks, worth in ((12, False), (14, True)):
        sizes = [f"model.encoder_layers={blocks}", "model.num_layers=12"]
        layers = "moe.layers={encoder: {every: 2}, decoder: {every: 2}}"
        config = load_config(None, ["data.mock=true", *ENCODER_DECODER, *sizes, layers])
        assert is_worth_it(config) == worth
