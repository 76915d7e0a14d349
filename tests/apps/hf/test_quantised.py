"""Quantised folders: the plain formulas, value by value, and whole models against their dequantised form."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder
from megamoe.apps.hf.quantised import E2M1, Dequantised, from_blocks, from_mxfp4
from megamoe.errors import UserError
from tests.support.apps.hf_models import change_config, make, write_tensors
from tests.support.apps.hf_training import all_tensors

pytest.importorskip("transformers")
GENERATOR = torch.Generator().manual_seed(11)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def blocks_of(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """E4M3 values and a factor for each block: the largest of a block becomes 448."""
    rows, columns = -(-weight.shape[0] // size), -(-weight.shape[1] // size)
    scale, values = torch.empty(rows, columns), torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
            scale[row, column] = weight[place].abs().max() / 448
            values[place] = weight[place] / scale[row, column]
    return values.to(torch.float8_e4m3fn), scale


def value_of_block(weight: Tensor, scale: Tensor, size: int, row: int, column: int) -> float:
    return float(weight[row, column].float()) * float(scale[row // size, column // size])


def test_block_fp8_is_each_value_times_its_blocks_factor() -> None:
    weight, scale = blocks_of(torch.randn(40, 24, generator=GENERATOR), 16)
    found = from_blocks(weight, scale, (16, 16), torch.float32)
    for row, column in ((0, 0), (15, 16), (16, 15), (39, 23)):
        assert float(found[row, column]) == pytest.approx(value_of_block(weight, scale, 16, row, column))


def value_of_mxfp4(blocks: Tensor, scales: Tensor, expert: int, row: int, column: int) -> float:
    """The value of the transposed tensor's place, by the format's definition."""
    group, inside = divmod(column, 32)
    byte = int(blocks[expert, row, group, inside // 2])
    return E2M1[byte >> 4 if inside % 2 else byte & 15] * 2.0 ** (int(scales[expert, row, group]) - 127)


def test_mxfp4_is_each_half_byte_times_two_to_its_groups_exponent() -> None:
    blocks = torch.randint(256, (2, 6, 3, 16), generator=GENERATOR).to(torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), generator=GENERATOR).to(torch.uint8)
    found = from_mxfp4(blocks, scales, torch.bfloat16)
    assert found.shape == (2, 96, 6) and found.dtype == torch.bfloat16
    for expert, row, column in ((0, 0, 0), (1, 5, 95), (0, 3, 33), (1, 2, 64), (1, 0, 1)):
        assert float(found[expert, column, row]) == value_of_mxfp4(blocks, scales, expert, row, column)


def quantised_deepseek(folder: Path) -> dict[str, Tensor]:
    """A DeepSeek-V3 in block FP8, as it is released, with its tensors for the next token but one; return the
    tensors that it stands for.
    """
    make("deepseek_v3", folder)
    expected: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_linear = "_proj" in name
        if is_linear:
            weight, scale = blocks_of(tensor, 16)
            stored |= {name: weight, f"{name}_scale_inv": scale}
            expected[name] = from_blocks(weight, scale, (16, 16), torch.bfloat16)
        else:
            is_bias = name.endswith("e_score_correction_bias")
            expected[name] = stored[name] = tensor if is_bias else tensor.to(torch.bfloat16)
    stored["model.layers.2.eh_proj.weight"] = torch.zeros(32, 64, dtype=torch.bfloat16)
    change_config(folder, dtype="bfloat16", quantization_config=FP8, num_nextn_predict_layers=1)
    write_tensors(folder, stored)
    return expected


def quantised_gpt_oss(folder: Path) -> dict[str, Tensor]:
    """A gpt-oss in MXFP4, as it is released; return the tensors that it stands for."""
    make("gpt_oss", folder, intermediate_size=32)
    expected: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=GENERATOR)
            scales = torch.randint(118, 124, (experts, rows, columns // 32), generator=GENERATOR)
            both = blocks.to(torch.uint8), scales.to(torch.uint8)
            stored |= {f"{name}_blocks": both[0], f"{name}_scales": both[1]}
            expected[name] = from_mxfp4(*both, torch.bfloat16)
        else:
            expected[name] = stored[name] = tensor.to(torch.bfloat16)
    change_config(folder, dtype="bfloat16", quantization_config=MXFP4)
    write_tensors(folder, stored)
    return expected


@pytest.mark.parametrize("make_folder", [quantised_deepseek, quantised_gpt_oss])
def test_a_quantised_folder_is_the_folder_that_it_stands_for(make_folder: Any, tmp_path: Path) -> None:
    expected = make_folder(tmp_path / "hf")
    lines: list[str] = []
    import_folder(tmp_path / "hf", tmp_path / "run", report=lines.append)
    export_run(tmp_path / "run", tmp_path / "back", report=lines.append)
    found = all_tensors(tmp_path / "back")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    told = "left out for multi-token prediction is not read: 1 tensors, the first of them model.layers.2.eh_"
    assert any(line.startswith(told) for line in lines) == (make_folder is quantised_deepseek)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    like = {"like": tmp_path / "hf", "report": lines.append}
    export_run(tmp_path / "run", tmp_path / "again", **like)  # type: ignore[arg-type]
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn", "e5m2"])
def test_the_format_has_two_names(fmt: str) -> None:
    """The second is that of MiniMax-M2."""
    folder: Any = SimpleNamespace(
        path=Path("hf"), tensors={}, config={"quantization_config": {**FP8, "fmt": fmt}}
    )
    if fmt != "e5m2":
        assert Dequantised(folder).config == {}
        return
    with pytest.raises(UserError, match="expected fmt e4m3 or float8_e4m3fn and .*, found e5m2 and"):
        Dequantised(folder)


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    quantised_deepseek(tmp_path / "hf")
    tensors, name = (
        load_file(tmp_path / "hf/model.safetensors"),
        "model.layers.0.mlp.gate_proj.weight_scale_inv",
    )
    for changed in ({**tensors, name: torch.ones(2, 2)}, {n: t for n, t in tensors.items() if n != name}):
        write_tensors(tmp_path / "hf", changed)
        with pytest.raises(
            UserError, match=r"gate_proj.weight_scale_inv: .*expected factors of shape \[3, 2\]"
        ):
            import_folder(tmp_path / "hf", tmp_path / "run")
