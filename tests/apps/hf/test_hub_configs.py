"""config.json of released models, in the form in which the hub has them, and folders of several files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.families import FAMILIES
from megamoe.apps.hf.family import as_config, dims_of
from megamoe.apps.hf.import_folder import import_folder
from megamoe.apps.hf.keys import value_of
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.config.shapes import moe_block_numbers
from megamoe.validation.run import section_problems
from tests.support.apps.hf_models import make
from tests.support.apps.hf_training import all_tensors
from tests.support.tiny import ROOT

SNAPSHOTS = ROOT / "tests/snapshots/hub_configs"
CASES: dict[str, dict[str, Any]] = yaml.safe_load((SNAPSHOTS / "expected.yaml").read_text())


def released(kind: str) -> dict[str, Any]:
    """config.json as the hub has it."""
    content: dict[str, Any] = json.loads((SNAPSHOTS / f"{kind}.json").read_text())
    return content


@pytest.mark.parametrize("kind", CASES)
def test_released_configurations_are_read(kind: str) -> None:
    config = as_config(FAMILIES[kind].read(released(kind)))
    assert {key: value_of(config, key) for key in CASES[kind]} == CASES[kind]
    assert not [*section_problems(config, 1, "bf16")]
    if kind == "deepseek_v3":
        assert moe_block_numbers(config) == [*range(4, 62)]
        (mask,) = config.moe.router.masks
        assert (mask.options.num_groups, mask.options.keep, mask.options.best) == (8, 4, 2)
        dims = dims_of(config, 129280)
        assert (dims["Q"], dims["U"], dims["O"]) == (128 * 192, 128 * 256, 128 * 128)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attn_type_list", [1, 0], "1 for each block"),
        ("shared_intermediate_size", 8, "0"),
        ("sliding_window", 8, "null"),
        ("layernorm_mlp_beta", 0.5, "1.0"),
    ],
)
def test_another_value_of_such_a_key_is_refused(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{key}: found {value}, expected {expected}; ")):
        FAMILIES["minimax_m2"].read({**released("minimax_m2"), key: value})


def test_keys_of_every_configuration_of_transformers_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    common = transformers.PreTrainedConfig(problem_type="regression").to_dict()
    known = {name: value for name, value in common.items() if value is not None and name != "model_type"}
    family, content = FAMILIES["deepseek_v3"], released("deepseek_v3")
    assert family.read({**known, **content}) == family.read(content)
    with pytest.raises(ValueError, match="is_encoder_decoder: found True, expected false"):
        family.read({**content, "is_encoder_decoder": True})


def test_a_folder_of_several_files_is_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make("qwen3_moe", tmp_path / "one")
    make("qwen3_moe", tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for name in ("one", "many"):
        import_folder(tmp_path / name, tmp_path / f"{name}_run", report=lambda line: None)
    step = "checkpoints/step_00000000"
    with (
        CheckpointReader(tmp_path / "one_run" / step) as one,
        CheckpointReader(tmp_path / "many_run" / step) as many,
    ):
        assert one.names() == many.names()
        assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())
    export_run(tmp_path / "many_run", tmp_path / "back", shard_bytes=20_000, report=lambda line: None)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    expected, found = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "back")
    assert index["weight_map"].keys() == expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
