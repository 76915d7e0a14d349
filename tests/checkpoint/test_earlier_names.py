"""A checkpoint with the names of earlier versions loads: tensors, configuration, records of skipped steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.checkpoint.format.meta import read_meta
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.checkpoint.tools.verify import problems
from tests.support import checkpoint
from tests.support.checkpoint_files import grid, seal, write_checkpoint

OLD = "model/model.decoder.layers.1.mlp.layer.router.gate.bias"
NEW = "model/model.decoder.layers.1.mlp.layer.router.score_function.bias"
OLD_ROUTER = {"scorer": {"name": "linear"}, "gate": {"name": "sigmoid"}, "restrictions": []}


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A checkpoint as an earlier version wrote it: a bias in two chunks."""
    bias = torch.arange(8.0)
    folder = write_checkpoint(
        tmp_path / "step_00000007",
        {OLD: bias},
        chunks={OLD: grid((8,), 2)},
        shardings={OLD.removeprefix("model/"): {}},
        config={"moe": {"router": OLD_ROUTER, "expert_dropout": 0.25}},
        broken_steps={"in_a_row": 1, "losses": [5.0]},
    )
    assert list(problems(folder)) == []
    return folder


def test_a_tensor_is_found_by_its_present_name(earlier: Path) -> None:
    with CheckpointReader(earlier) as saved:
        assert saved.names() == [NEW]
        assert torch.equal(saved.tensor(NEW), torch.arange(8.0))
        assert list(saved.index["shardings"]) == [NEW.removeprefix("model/")]


def test_damage_under_an_old_name_is_seen(earlier: Path) -> None:
    index = checkpoint.load(earlier / "index.json")
    index["tensors"][OLD.replace("bias", "other")] = index["tensors"].pop(OLD)
    checkpoint.dump(earlier / "index.json", index)
    seal(earlier)
    assert any("bias" in problem for problem in problems(earlier))


def test_the_configuration_and_the_record_have_present_names(earlier: Path) -> None:
    meta = read_meta(earlier)
    moe: dict[str, Any] = meta["config"]["moe"]
    assert moe == {
        "router": {"scorer": {"name": "linear"}, "score_function": {"name": "sigmoid"}, "masks": []},
        "expert_output_dropout": 0.25,
    }
    assert meta.get("skip_policy") == {"in_a_row": 1, "losses": [5.0]}


def test_names_stored_inside_a_file_are_ignored(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "step_00000007")
    index = checkpoint.load(folder / "index.json")
    index["tensors"]["model/bias"]["stored_name"] = "model/norm"
    checkpoint.dump(folder / "index.json", index)
    seal(folder)
    with CheckpointReader(folder) as saved:
        assert saved.tensor("model/bias").dtype == torch.float64
