"""`convert --consolidated`: the whole weights of a checkpoint in one file."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megamoe.apps.checkpoints import stream, verify
from megamoe.apps.checkpoints.stream import consolidate
from megamoe.checkpoint.format.files import SUMS, sha256
from megamoe.errors import UserError
from tests.support import checkpoint

WEIGHTS = {n.removeprefix("model/"): t for n, t in checkpoint.tensors().items() if n.startswith("model/")}


@pytest.fixture(params=[1 << 26, 7], ids=["whole slabs", "slabs of 7 elements"], autouse=True)
def slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLAB", request.param)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint.write(tmp_path / "step_00000007")


def test_whole_weights_in_one_file(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "weights"
    consolidate(source, out)
    assert sorted(path.name for path in out.iterdir()) == [SUMS, "model.json", "model.safetensors"]
    found = load_file(out / "model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    about = checkpoint.load(out / "model.json")
    assert (about["step"], about["tokens"], about["config"]["name"]) == (7, 448, "by_hand")
    assert about["parameters"] == {"total": 48 + 64 + 5 + 128 + 64, "experts": 128 + 64}
    assert about["tensors"]["up"] == {"shape": [4, 8, 4], "dtype": "float32", "parameters": 128}
    assert about["tensors"]["table"]["parameters"] == 0
    assert (out / SUMS).read_text().split() == [
        word for name in ("model.json", "model.safetensors") for word in (sha256(out / name), name)
    ]
    assert os.stat(out).st_mode & 0o777 == os.stat(source).st_mode & 0o777


def test_weights_are_rounded_and_buffers_are_not(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out", dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in WEIGHTS.items():
        expected = tensor.bfloat16() if name in checkpoint.SHARDINGS else tensor
        assert torch.equal(found[name], expected) and found[name].dtype == expected.dtype


def assert_refused(source: Path, out: Path) -> None:
    with pytest.raises(UserError) as refusal:
        consolidate(source, out)
    assert str(refusal.value).isprintable()


def test_what_exists_is_not_replaced_and_the_source_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for out in (source, tmp_path / "empty", tmp_path / "dangling", source / "inside"):
        assert_refused(source, out)
    assert list((tmp_path / "empty").iterdir()) == [] and list(verify.problems(source)) == []


def test_a_damaged_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    os.truncate(source / "shard_00001.safetensors", 500)
    assert_refused(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_what_fails_half_way_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream, "write_line", fail)
    with pytest.raises(OSError):
        consolidate(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
