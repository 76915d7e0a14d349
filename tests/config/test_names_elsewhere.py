"""Keys and options of other frameworks are answered with the key that says the same here."""

import pytest
import yaml

from megamoe.config import RunConfig, load_config
from megamoe.config.messages import NAMES_ELSEWHERE, _known_keys, key_for
from megamoe.errors import UserError
from megamoe.train.command import main

NAMES = yaml.safe_load(NAMES_ELSEWHERE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_the_key_exists_and_the_example_is_accepted(name: str) -> None:
    row = NAMES[name]
    *sections, key = row["key"].split(".")
    assert key in _known_keys(RunConfig, sections)
    for override in row.get("example", "").split(" ") if name == "betas" else [row.get("example")]:
        if override:
            load_config(None, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("moe.num_experts_per_token=2", "moe: unknown key 'num_experts_per_token'; here it is "
         "moe.router.selector, as in moe.router.selector.k=2"),
        ("train.gradient_accumulation_steps=2", "train: unknown key 'gradient_accumulation_steps'; here it "
         "is train.global_batch_size; it is global_batch_size / (micro_batch_size x data-parallel size)"),
        ("model.num_hidden_layers=2", "model: unknown key 'num_hidden_layers'; here it is model.num_layers"),
        ("hidden_size=64", "unknown key 'hidden_size'; here it is model.hidden_size"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_answered(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    assert str(caught.value) == f"command line: {message}"


def test_an_option_of_megatron_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--config", "run.yaml", "--num-layers", "4"])
    assert caught.value.code == 2
    assert "--num-layers; here it is model.num_layers, without --" in capsys.readouterr().err
    assert key_for("no_such_name") is None
