"""Multi-token prediction of folders as the hub has them is left out, and told."""

from pathlib import Path

import pytest
import torch

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder
from tests.support.apps.hf_models import change_config, make, write_tensors
from tests.support.apps.hf_training import all_tensors

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "name"), [("deepseek_v3", "layers.2.eh_proj"), ("ernie4_5_moe", "mtp_block.0")]
)
def test_its_blocks_are_left_out_by_name(kind: str, name: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "hf")
    found = all_tensors(tmp_path / "hf")
    write_tensors(tmp_path / "hf", {**found, f"model.{name}.weight": torch.ones(32)})
    change_config(tmp_path / "hf", num_nextn_predict_layers=1)
    lines: list[str] = []
    import_folder(tmp_path / "hf", tmp_path / "run", report=lines.append)
    told = (
        f"left out for multi-token prediction is not read: 1 tensors, the first of them model.{name}.weight"
    )
    assert told in lines
    export_run(tmp_path / "run", tmp_path / "back", report=lines.append)
    assert all_tensors(tmp_path / "back").keys() == found.keys()
