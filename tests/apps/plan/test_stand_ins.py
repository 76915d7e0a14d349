"""What a plan puts in place of data and of parts that go by values leaves a configuration that is valid."""

import pytest

from megamoe.apps.plan.stand_ins import STEPS_OF_EPOCHS, without_data
from megamoe.config import RunConfig, load_config
from megamoe.registry import list_presets
from megamoe.validation.run import section_problems

NEEDS = {
    "longcat_flash": ["moe.zero_experts.identity=8"],
    "expert_choice": ["moe.router.selector.allow_non_causal=true"],
}


def problems(config: RunConfig) -> list[str]:
    return [str(each) for each in section_problems(config, 1, "fp32")]


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_stays_valid(name: str) -> None:
    overrides = [f"moe.router={name}", "moe.num_experts=64", "moe.layers.every=1", "data.mock=true"]
    config = load_config(None, [*overrides, *NEEDS.get(name, [])])
    assert not problems(config)
    assert not problems(without_data(config)[0])


def test_losses_that_need_what_is_replaced_are_left_out_and_told() -> None:
    overrides = ["moe.router=skywork_moe", "moe.layers.every=1", "moe.losses.z_loss=0.1", "data.mock=true"]
    changed, lines = without_data(load_config(None, overrides))
    assert [*changed.moe.losses] == ["z_loss"]
    assert lines == [
        "moe.router.capacity: per_expert drops pairs by value; counted as if none were dropped",
        "moe.losses.drop_rate_balance: needs what is replaced above; not counted",
    ]


def test_chats_are_counted_as_text_and_epochs_as_steps() -> None:
    """The conversations cannot be read: mock data stands for them."""
    overrides = ["data.sources=[data/chat]", "data.document_aware=true", "train.epochs=3", "train.steps=null"]
    config = load_config(None, [*overrides, "train.objective=chat", "model.vocab_size=64"])
    changed, lines = without_data(config)
    assert not problems(changed)
    assert changed.train.objective.name == "causal"
    assert (changed.train.steps, changed.train.epochs) == (STEPS_OF_EPOCHS, None)
    assert "train.objective: chat is counted as causal" in lines
    assert "train.epochs: their length is not known; counted as 1,000,000 steps" in lines
