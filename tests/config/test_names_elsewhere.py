"""Keys and options of other frameworks are answered with the key that says the same here."""

import pytest
import yaml

from megamoe.config import RunConfig, load_config
from megamoe.config.messages import NAMES_ELSEWHERE, _known_keys, key_for
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


def test_an_option_of_megatron_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--config", "run.yaml", "--num-layers", "4"])
    assert caught.value.code == 2
    assert "--num-layers; here it is model.num_layers, without --" in capsys.readouterr().err
    assert key_for("no_such_name") is None
