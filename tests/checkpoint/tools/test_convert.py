"""Converted checkpoints: whole weights in one file, and the same state cut for another layout."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megamoe.checkpoint.format.boxes import Box
from megamoe.checkpoint.format.files import INDEX, META, SUMS
from megamoe.checkpoint.format.integrity import sha256
from megamoe.checkpoint.format.reader import Saved
from megamoe.checkpoint.format.sharding import Sharding
from megamoe.checkpoint.tools import relayout as relayout_module
from megamoe.checkpoint.tools import stream, verify
from megamoe.checkpoint.tools.consolidate import consolidate
from megamoe.checkpoint.tools.relayout import relayout
from megamoe.errors import UserError
from megamoe.parallel.layout import Layout
from tests.checkpoint import checkpoint
from tests.checkpoint_files import seal


@pytest.fixture(params=[1 << 26, 7], ids=["whole slabs", "slabs of 7 elements"], autouse=True)
def slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLAB", request.param)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint.write(tmp_path / "step_00000007")


WEIGHTS = {n.removeprefix("model/"): t for n, t in checkpoint.tensors().items() if n.startswith("model/")}


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
    consolidate(source, tmp_path / "out", dtype="bf16", optimizer=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in WEIGHTS.items():
        expected = tensor.bfloat16() if name in checkpoint.SHARDINGS else tensor
        assert torch.equal(found[name], expected) and found[name].dtype == expected.dtype
    state = load_file(tmp_path / "out" / "optimizer.safetensors")
    expected_names = {n for n in checkpoint.tensors() if n.startswith(("exp_avg/", "exp_avg_sq/", "step/"))}
    assert state.keys() == expected_names
    for name in expected_names:
        assert torch.equal(state[name], checkpoint.tensors()[name])


LAYOUTS = [
    (Layout(1), 0),
    (Layout(1), 3),
    (Layout(2, 1, 2), 1),
    (Layout(3), 1),
    (Layout(4, 2, 2, 1), 0),
    (Layout(4, 2, 2, 2), 2),
    (Layout(4, 4, 1, 2), 3),
    (Layout(8, 2, 4, 2), 1),
    (Layout(16), 3),
]


@pytest.mark.parametrize(("layout", "stage"), LAYOUTS)
def test_another_layout_holds_the_same(source: Path, tmp_path: Path, layout: Layout, stage: int) -> None:
    out = tmp_path / "step_00000007_again"
    relayout(source, out, layout, stage)
    assert list(verify.problems(out)) == []
    with Saved(out) as saved:
        assert saved.index["tensors"].keys() == checkpoint.tensors().keys()
        for name, tensor in checkpoint.tensors().items():
            found = saved.tensor(name)
            assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        for name in checkpoint.SHAPES:
            _assert_cut_as_ranks_read(saved, name, layout, stage)
    meta = checkpoint.load(out / META)
    assert meta["layout"] | {"precision": 0} == vars(layout) | {"zero_stage": stage, "precision": 0}
    assert meta["random_layout"] == {"ranks": 2, "tensor": 1}
    assert meta["config"]["parallel"]["expert"] == layout.expert


def _assert_cut_as_ranks_read(saved: Saved, name: str, layout: Layout, stage: int) -> None:
    """Each box lies in the part of the rank whose file has it; replicas have about as much as each other."""
    sharding = Sharding.from_json(checkpoint.SHARDINGS[name])
    part = list(checkpoint.SHAPES[name])
    for cut in sharding.placement(tuple(part), layout, 0).cuts:
        part[cut.dim] //= cut.count
    holders: dict[Any, list[int]] = {}
    for rank in range(layout.ranks):
        holders.setdefault(sharding.placement(tuple(part), layout, rank), []).append(rank)
    written = [0] * layout.ranks
    for rank, offsets, sizes in saved.index["tensors"][f"exp_avg/{name}"]["chunks"]:
        written[rank] += math.prod(sizes)
        placement = sharding.placement(tuple(part), layout, rank)
        mine = [box for box, _ in placement.parts(Box((0,) * len(part), tuple(part)))]
        assert any(
            all(
                a <= o and o + s <= a + n
                for a, n, o, s in zip(it.offsets, it.sizes, offsets, sizes, strict=True)
            )
            for it in mine
        )
    for ranks in holders.values():
        shares = [written[rank] for rank in ranks]
        assert sum(shares) == math.prod(part)
        each = -(-math.prod(part) // len(ranks))
        assert max(shares) == (each if stage else math.prod(part))


def test_there_and_back_is_the_same_in_every_byte_of_the_tensors(source: Path, tmp_path: Path) -> None:
    relayout(source, tmp_path / "one", Layout(1), 0)
    relayout(tmp_path / "one", tmp_path / "eight", Layout(8, 2, 4, 2), 3)
    relayout(tmp_path / "eight", tmp_path / "back", Layout(1), 0)
    assert sha256(tmp_path / "back/shard_00000.safetensors") == sha256(
        tmp_path / "one/shard_00000.safetensors"
    )
    assert (tmp_path / "back" / INDEX).read_text() == (tmp_path / "one" / INDEX).read_text()
    assert checkpoint.load(tmp_path / "back" / META) == checkpoint.load(tmp_path / "one" / META)


ILLEGAL = [
    (Layout(4, 3), "--tensor: 3 does not divide --ranks 4"),
    (Layout(4, 1, 8), "--expert x --expert-tensor: 8 x 1 does not divide --ranks 4"),
    (Layout(8, 8), "--tensor: 8 does not divide model.num_attention_heads 4"),
    (Layout(8, 1, 8), "--expert: 8 does not divide the 4 rows that it cuts of model/"),
    (Layout(3, 1, 1, 3), "--expert-tensor: 3 does not divide the 4 rows"),
    (Layout(0), "--ranks: 0 is not between 1 and 99999"),
    (Layout(10**12), "--ranks: 1000000000000 is not between"),
    (Layout(2, -1), "--tensor: -1 is not between"),
]


@pytest.mark.parametrize(("layout", "told"), ILLEGAL)
def test_what_does_not_divide_is_refused(source: Path, tmp_path: Path, layout: Layout, told: str) -> None:
    with pytest.raises(UserError) as refusal:
        relayout(source, tmp_path / "out", layout)
    assert told in str(refusal.value) and str(refusal.value).isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def test_a_dense_model_has_no_experts_to_cut(source: Path, tmp_path: Path) -> None:
    index = checkpoint.load(source / INDEX)
    index["shardings"] = {name: {} for name in index["shardings"]}
    checkpoint.dump(source / INDEX, index)
    seal(source)
    with pytest.raises(UserError, match="is of a dense model"):
        relayout(source, tmp_path / "out", Layout(2, 1, 2))


@pytest.mark.parametrize("shardings", [{"norm": {"tensor": [1, 1]}}, {"norm": {"tensor": [0, 2]}}])
def test_a_forged_cut_is_refused(source: Path, tmp_path: Path, shardings: dict[str, Any]) -> None:
    checkpoint.dump(source / INDEX, {**checkpoint.load(source / INDEX), "shardings": shardings})
    seal(source)
    with pytest.raises(UserError, match="model/norm of shape|exp_avg/norm of shape"):
        relayout(source, tmp_path / "out", Layout(1))


def convert_both(source: Path, out: Path) -> None:
    for convert in (lambda: consolidate(source, out), lambda: relayout(source, out, Layout(1))):
        with pytest.raises(UserError) as refusal:
            convert()
        assert str(refusal.value).isprintable()


def test_what_exists_is_not_replaced_and_the_source_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for out in (source, tmp_path / "empty", tmp_path / "dangling", source / "inside"):
        convert_both(source, out)
    assert list((tmp_path / "empty").iterdir()) == [] and list(verify.problems(source)) == []


def test_a_damaged_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    os.truncate(source / "shard_00001.safetensors", 500)
    convert_both(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_what_fails_half_way_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(relayout_module, "write_json", fail)
    with pytest.raises(OSError):
        relayout(source, tmp_path / "out", Layout(1))
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
