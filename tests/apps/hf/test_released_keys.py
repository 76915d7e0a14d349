"""config.json of an export has the keys of released folders, which other programs than transformers read."""

import copy
from typing import Any

import pytest
import torch
import yaml

from megamoe.apps.hf.export_run import Target, _config
from megamoe.apps.hf.families import FAMILIES
from megamoe.apps.hf.family import as_config, differences
from megamoe.apps.hf.folder import SPECIAL_IDS
from megamoe.apps.hf.tensor_files import Stored
from tests.apps.hf.test_tables import written
from tests.support.apps.hf_models import CONFIGS, WORDS
from tests.support.tiny import ROOT

transformers = pytest.importorskip("transformers")
RELEASED = yaml.safe_load((ROOT / "tests/snapshots/released_keys.yaml").read_text())
STORED = {"model.embed_tokens.weight": Stored(torch.bfloat16, (WORDS, 32))}


def exported(kind: str, number: int, like: dict[str, Any]) -> dict[str, Any]:
    """config.json of an export; like: that of the folder the model was imported from."""
    family = FAMILIES[kind]
    config = as_config(family.read(written(kind, number)))
    target = Target(family, config, [], like, {}, dict.fromkeys(SPECIAL_IDS), [])
    return _config(target, STORED)


@pytest.mark.parametrize("of_import", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_released_keys_are_written_and_change_nothing(kind: str, of_import: bool) -> None:
    """Of a run of ours, and of a folder that transformers has saved, whose own values stay."""
    constants = RELEASED["classes"][kind]["constants"]
    names = {*RELEASED["every"], *RELEASED["classes"][kind]["keys"], *constants}
    for number in (0, 1):
        before = written(kind, number)
        content = exported(kind, number, before if of_import else {})
        listed = {"first_k_dense_replace"} if "mlp_layer_types" in before else set()
        assert names - content.keys() <= listed
        kept = before if of_import else {}
        assert {name: content[name] for name in constants} == {
            name: kept.get(name, value) for name, value in constants.items()
        }
        if of_import:
            assert before.items() <= {**content, "dtype": before.get("dtype")}.items()
        config = as_config(FAMILIES[kind].read(before))
        assert differences(config, as_config(FAMILIES[kind].read(content))) == {}
        own = [getattr(transformers, CONFIGS[kind][0])(**copy.deepcopy(each)) for each in (before, content)]
        rotary = [{"partial_rotary_factor": 1.0, **each.rope_parameters, "type": None} for each in own]
        assert rotary[0] == rotary[1]


def test_dense_blocks_that_are_not_the_first_have_no_number() -> None:
    assert "first_k_dense_replace" not in exported("glm4_moe_lite", 0, {})  # sparse, dense
    assert exported("glm4_moe_lite", 1, {})["first_k_dense_replace"] == 1
    assert exported("hy_v3", 0, {})["first_k_dense_replace"] == 1
