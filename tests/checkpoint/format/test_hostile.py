"""Checkpoints with malicious content and valid checksums are refused in one line, before anything is done."""

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.checkpoints import verify
from megamoe.apps.checkpoints.describe import integrity_of
from megamoe.checkpoint.format import meta
from megamoe.checkpoint.format.files import INDEX, META
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.errors import UserError
from megamoe.parallel.chunks import Chunk, first_overlap
from megamoe.train.resume import check_init, check_resume
from tests.support import checkpoint
from tests.support.checkpoint_files import seal, write_checkpoint
from tests.support.hostile import SHARD, assert_refused
from tests.support.tiny import VOCABULARY, tiny

pytestmark = pytest.mark.usefixtures("patience")
Harm = Callable[[Path], object]


def test_the_handmade_checkpoint_is_intact(folder: Path) -> None:
    assert list(verify.problems(folder)) == []
    with CheckpointReader(folder) as reader:
        assert reader.index["shardings"].keys() == checkpoint.SHAPES.keys()
        for name, tensor in checkpoint.tensors().items():
            assert torch.equal(reader.tensor(name), tensor)


def of_meta(change: Callable[[Any], Any]) -> Harm:
    return lambda folder: checkpoint.dump(folder / META, change(checkpoint.load(folder / META)))


def setting(**values: Any) -> Harm:
    return of_meta(lambda meta: {**meta, **values})


def of_layout(**values: Any) -> Harm:
    return of_meta(lambda meta: {**meta, "layout": {**meta["layout"], **values}})


def of_tensor(name: str, **values: Any) -> Harm:
    def change(folder: Path) -> None:
        index = checkpoint.load(folder / INDEX)
        index["tensors"][name] |= values
        checkpoint.dump(folder / INDEX, index)

    return change


def of_index(**values: Any) -> Harm:
    return lambda folder: checkpoint.dump(folder / INDEX, {**checkpoint.load(folder / INDEX), **values})


def text(name: str, content: str | bytes) -> Harm:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def replaced(name: str, old: str, new: str) -> Harm:
    def change(folder: Path) -> None:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new, 1))

    return change


def header(change: Callable[[dict[str, Any]], Any]) -> Harm:
    """The header of the first shard."""

    def apply(folder: Path) -> None:
        content = (folder / SHARD).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        new = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
        (folder / SHARD).write_bytes(struct.pack("<Q", len(new)) + new + content[8 + length :])

    return apply


def first_entry(**values: Any) -> Harm:
    def change(content: dict[str, Any]) -> dict[str, Any]:
        name = next(name for name in content if name != "__metadata__")
        return {**content, name: {**content[name], **values}}

    return header(change)


def renamed(content: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}\x1b[2J\nok" if name.startswith("model") else name: it for name, it in content.items()}


DEEP = "[" * 100_000 + "]" * 100_000
MANY = {f"t{n}": {"dtype": "float32", "shape": [1], "chunks": [[0, [0], [1]]]} for n in range(1000)}
VAST = 1 << 45
EMBEDDING = "model/embedding"  # [12, 4]
FORGED: dict[str, Harm] = {
    "deep meta": text(META, DEEP),
    "deep object": text(META, '{"a":' * 50_000 + "1" + "}" * 50_000),
    "deep config": setting(config={"a": json.loads("[" * 200 + "]" * 200)}),
    "deep index": text(INDEX, DEEP),
    "deep tensors": text(INDEX, '{"tensors": ' + DEEP + ', "shardings": {}}'),
    "meta is a list": text(META, "[]"),
    "index is a list": text(INDEX, "[]"),
    "empty meta": text(META, ""),
    "empty index": text(INDEX, ""),
    "meta is no text": text(META, b"\xff\xfe{}"),
    "index is no text": text(INDEX, b"\xff\xfe{}"),
    "huge number": replaced(META, '"step": 7', '"step": ' + "9" * 5000),
    "large number": replaced(META, '"step": 7', '"step": ' + "9" * 4000),
    "step beyond 64 bits": setting(step=1 << 64),
    "negative step": setting(step=-1),
    "step is NaN": replaced(META, '"step": 7', '"step": NaN'),
    "step is a float": setting(step=7.0),
    "step is a word": setting(step="7"),
    "step is true": setting(step=True),
    "step twice": replaced(META, '"step": 7', '"step": 7, "step": 8'),
    "format is a megabyte": setting(format="x" * 1_000_000),
    "format has control characters": setting(format="\x1b[2J\n"),
    "scale is infinite": setting(loss_scaler={"cur_scale": float("inf")}),
    "losses are words": setting(skip_policy={"losses": ["a", "b"]}),
    "plugins are numbers": setting(plugins={"mine.py": 1}),
    "scale is a method": setting(loss_scaler={"update_scale": 1.0}),
    "no layout": of_meta(lambda meta: {key: value for key, value in meta.items() if key != "layout"}),
    "no ranks": of_layout(ranks=0),
    "ZeRO 4": of_layout(zero_stage=4),
    "another precision": of_layout(precision="fp64\n"),
    "config is a list": setting(config=[1]),
    "negative shape": of_tensor(EMBEDDING, shape=[-12, -4]),
    "negative offset": of_tensor(EMBEDDING, chunks=[[0, [-6, 0], [12, 4]], [1, [6, 0], [6, 4]]]),
    "astronomic shape": of_tensor(
        EMBEDDING, shape=[1 << 40, 1 << 40], chunks=[[0, [0, 0], [1 << 40, 1 << 40]]]
    ),
    "large shape": of_tensor(EMBEDDING, shape=[VAST], chunks=[[0, [0], [VAST]]]),
    "large scalar": of_tensor("step/norm", shape=[VAST], chunks=[[0, [0], [VAST]]]),
    "empty but vast": of_tensor(EMBEDDING, shape=[0, 1 << 60, 1 << 60], chunks=[]),
    "many dimensions": of_tensor(EMBEDDING, shape=[1 << 62] * 200_000, chunks=[]),
    "shape of floats": of_tensor(EMBEDDING, shape=[12.0, 4.0]),
    "shape of words": of_tensor(EMBEDDING, shape=["12", "4"]),
    "shape beyond 64 bits": of_tensor(EMBEDDING, shape=[1 << 80, 4]),
    "another shape": of_tensor(EMBEDDING, shape=[4, 12], chunks=[[0, [0, 0], [4, 12]]]),
    "another dtype": of_tensor(EMBEDDING, dtype="float64"),
    "an unknown dtype": of_tensor(EMBEDDING, dtype="load"),
    "overlap": of_tensor(EMBEDDING, chunks=[[0, [0, 0], [6, 4]], [1, [3, 0], [6, 4]]]),
    "the same twice": of_tensor(EMBEDDING, chunks=[[0, [0, 0], [6, 4]], [1, [0, 0], [6, 4]]]),
    "a hole": of_tensor(EMBEDDING, chunks=[[0, [0, 0], [6, 4]]]),
    "outside": of_tensor(EMBEDDING, chunks=[[0, [0, 0], [6, 4]], [1, [7, 0], [6, 4]]]),
    "no chunks": of_tensor(EMBEDDING, chunks=[]),
    "many chunks": of_tensor(
        EMBEDDING, chunks=[[0, [row, column], [1, 1]] for row in range(12) for column in range(4)]
    ),
    "a chunk of other dimensions": of_tensor(EMBEDDING, chunks=[[0, [0], [48]]]),
    "a shard of no rank": of_tensor(EMBEDDING, chunks=[[0, [0, 0], [6, 4]], [2, [6, 0], [6, 4]]]),
    "a shard of huge number": of_tensor(EMBEDDING, chunks=[[1 << 62, [0, 0], [12, 4]]]),
    "a negative shard": of_tensor(EMBEDDING, chunks=[[-1, [0, 0], [12, 4]]]),
    "a shard that is a path": of_tensor(EMBEDDING, chunks=[["../../x", [0, 0], [12, 4]]]),
    "chunks in another shard": of_tensor(EMBEDDING, chunks=[[1, [0, 0], [6, 4]], [0, [6, 0], [6, 4]]]),
    "a tensor twice": replaced(INDEX, '"tensors": {', '"tensors": {"model/embedding": {}, '),
    "a sharding of another word": of_index(shardings={"norm": {"exec": 1}}),
    "a negative sharding": of_index(shardings={"norm": {"tensor": [-1, 1]}}),
    "tensors of no shard": of_index(tensors=MANY),
    "a name of a megabyte": of_index(
        tensors={"x" * 1_000_000: {"dtype": "float32", "shape": [1], "chunks": []}}
    ),
    "a name of control characters": of_index(tensors={"\x1b[2J\n\ud800": {}}),
    "shard is empty": text(SHARD, b""),
    "header longer than all": text(SHARD, struct.pack("<Q", (1 << 64) - 1) + b"{}"),
    "header longer than the file": text(SHARD, struct.pack("<Q", 1000) + b"{}"),
    "header is deep": text(SHARD, struct.pack("<Q", 200_000) + DEEP.encode()),
    "header says another shape": first_entry(shape=[1 << 40]),
    "header overflows": first_entry(shape=[1 << 62, 1 << 62]),
    "header says another dtype": first_entry(dtype="I32"),
    "header says an unknown dtype": first_entry(dtype="OBJECT"),
    "header says the first bytes again": header(
        lambda it: {**it, "more": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ),
    "header has one less": header(lambda it: dict(list(it.items())[1:])),
    "header of control characters": header(renamed),
    "no index": lambda folder: (folder / INDEX).unlink(),
    "index of another step": of_index(step=6),
    "index of another run": of_index(step=7, id="another"),
    "index of an earlier version": setting(id="mine"),
    "no shard": lambda folder: (folder / SHARD).unlink(),
}


# What a model would miss, or not ask for.
FORGED_FOR_VERIFY: dict[str, Harm] = {
    "no tensors": of_index(tensors={}),
    "a shard too many": lambda folder: shutil.copy(folder / SHARD, folder / "shard_00009.safetensors"),
    "a tensor too many": header(
        lambda it: {**it, "more": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    ),
}


@pytest.mark.parametrize("harm", FORGED_FOR_VERIFY.values(), ids=FORGED_FOR_VERIFY.keys())
def test_what_is_not_asked_for_is_seen_by_verify(folder: Path, harm: Harm) -> None:
    harm(folder)
    seal(folder)
    assert integrity_of(folder).startswith("damaged: shard_0000")


# Of those that something else would refuse too, by what they must be.
TOLD = {
    "overlap": "overlap",
    "the same twice": "overlap",
    "a hole": "chunks of 24 elements for shape",
    "outside": "outside shape",
    "many chunks": "48 chunks, expected at most 12 (shard files: 2)",
    "astronomic shape": "too many elements",
    "empty but vast": "too many elements",
    "a tensor twice": "stands twice",
    "step twice": "stands twice",
    "deep config": "nested too deeply",
    "index of another step": "of another checkpoint of step 6; checkpoint.json is of step 7",
    "index of another run": "of another checkpoint of this step; checkpoint.json is of step 7",
    "another dtype": "is F32 [6, 4], expected F64 [6, 4]",
}


@pytest.mark.parametrize("name", FORGED)
def test_what_fits_its_checksums_is_refused_for_what_it_says(folder: Path, name: str) -> None:
    FORGED[name](folder)
    seal(folder)
    tracemalloc.start()
    try:
        assert TOLD.get(name, "") in assert_refused(folder)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_thousands_of_chunks_in_one_shard_are_refused_before_they_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard does hold them: nothing else is wrong with the checkpoint."""
    cut = [(0, [at], [1]) for at in range(3000)]
    write_checkpoint(tmp_path, {"model/norm": torch.arange(3000)}, chunks={"model/norm": cut})
    monkeypatch.setattr(meta, "first_overlap", None)
    assert assert_refused(tmp_path) == (
        "index.json: missing or damaged (model/norm: 3000 chunks, expected at most 2 (shard files: 1)); name "
        "another checkpoint"
    )


def test_many_chunks_are_compared_in_time() -> None:
    """A checkpoint of 10 000 ranks, cut by columns; then with two of them alike."""
    columns = [Chunk((0, at), (100, 1)) for at in range(10_000)]
    assert first_overlap(columns) is None
    assert first_overlap([*columns, Chunk((50, 777), (1, 1))]) == (columns[777], Chunk((50, 777), (1, 1)))


CONFIGS: list[Any] = [
    {},
    {"model": 3, "data": 3, "moe": 3},
    {"model": {}, "data": {}, "moe": {"router": [], "losses": {}}},
    {"model": {}, "data": {}, "moe": {"router": {"scorer": {}}, "losses": None}},
    {"model": {"num_layers": "x\n" * 1000}, "data": {}, "moe": {"router": {"scorer": {}}, "losses": {}}},
    {"model": [], "seed": [[[]]]},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_an_invalid_configuration_is_refused_by_a_resume(folder: Path, config: Any) -> None:
    setting(config=config, vocabulary=VOCABULARY)(folder)
    start = tiny(f"checkpoint.init.path={folder}")
    for check in (
        lambda: check_resume(tiny(), VOCABULARY, folder),
        lambda: check_init(start, VOCABULARY, folder / "elsewhere"),
    ):
        with pytest.raises(UserError) as refusal:
            check()
        assert str(refusal.value).isprintable() and len(str(refusal.value)) < 1000
