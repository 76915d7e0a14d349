"""Checkpoints on the disk, written and read without an engine: the format as its description has it."""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megamoe.checkpoint.format.files import sha256, write_sums

Tensors = dict[str, Tensor]
Chunk = tuple[int, list[int], list[int]]  # number of the shard, offsets, sizes
META: dict[str, Any] = {
    "format": 2,
    "saved_at": "2024-01-01T00:00:00+00:00",
    "step": 1,
    "samples": 8,
    "micro_batches": 8,
    "skipped_steps": 0,
    "tokens": 256,
    "vocabulary": 48,
    "layout": {
        "ranks": 1,
        "tensor": 1,
        "expert": 1,
        "expert_tensor": 1,
        "zero_stage": 0,
        "precision": "fp32",
    },
    "loss_scaler": {},
    "config": {},
}


def grid(shape: tuple[int, ...], *counts: int) -> list[Chunk]:
    """Split a tensor in `counts` along its first dimensions, evenly or not; one shard file each."""
    runs = []
    for dim, size in enumerate(shape):
        count = min(counts[dim] if dim < len(counts) else 1, size)
        ends = [number * size // count for number in range(count + 1)]
        runs.append([(start, end - start) for start, end in pairwise(ends)])
    return [
        (number, [start for start, _ in chunk], [size for _, size in chunk])
        for number, chunk in enumerate(product(*runs))
    ]


def write_checkpoint(
    folder: Path,
    tensors: Tensors,
    *,
    chunks: Mapping[str, list[Chunk]] | None = None,
    shardings: Mapping[str, Any] | None = None,
    **meta: Any,
) -> Path:
    """Write a complete checkpoint; return its folder. chunks: by default, each tensor is whole in shard 0."""
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    shards: dict[int, Tensors] = {0: {}}
    for name, tensor in tensors.items():
        shape, held_chunks = list(tensor.shape), (chunks or {}).get(name) or grid(tuple(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "shape": shape, "chunks": [list(chunk) for chunk in held_chunks]}
        for number, offsets, sizes in held_chunks:
            key = name if sizes == shape else f"{name}@{','.join(map(str, offsets))}"
            shards.setdefault(number, {})[key] = _view(tensor, offsets, sizes).clone().contiguous()
    for number, held in shards.items():
        save_file(held, folder / f"shard_{number:05d}.safetensors")
    of_both = {"id": meta["id"]} if "id" in meta else {}
    content = {**of_both, "tensors": index, "shardings": dict(shardings or {})}
    (folder / "index.json").write_text(json.dumps(content))
    layout = {**META["layout"], "ranks": max(shards) + 1}
    (folder / "checkpoint.json").write_text(json.dumps({**META, "layout": layout, **meta}))
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    """Write SHA256SUMS for what is in the folder now."""
    write_sums(folder, {path.name: sha256(path) for path in folder.iterdir() if path.name != "SHA256SUMS"})


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of index.json."""
    content: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return content


def read_tensors(folder: Path) -> Tensors:
    """Return every global tensor, read from all shards. Each element must be saved once."""
    files = {int(path.stem[-5:]): load_file(path) for path in folder.glob("shard_*.safetensors")}
    found, used = {}, 0
    for name, about in read_index(folder)["tensors"].items():
        whole = torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]))
        times = torch.zeros(about["shape"], dtype=torch.int8)
        for number, offsets, sizes in about["chunks"]:
            key = name if sizes == about["shape"] else f"{name}@{','.join(map(str, offsets))}"
            _view(whole, offsets, sizes).copy_(files[number][key])
            _view(times, offsets, sizes).add_(1)
            used += 1
        assert bool((times == 1).all()), name
        found[name] = whole
    assert used == sum(map(len, files.values())), "a shard holds what the index does not name"
    return found


def flip(path: Path, at: int = -1, bits: int = 1) -> None:
    """Flip bits of one byte of a file, by default the last bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint, and write it again, intact, with one shard."""
    tensors = read_tensors(folder)
    change(tensors)
    meta = json.loads((folder / "checkpoint.json").read_text())
    shardings = read_index(folder)["shardings"]
    for path in folder.glob("shard_*.safetensors"):
        path.unlink()
    write_checkpoint(folder, tensors, shardings=shardings, **meta)


def assert_same_bits(one: Tensors, other: Tensors) -> None:
    """Compare as bytes: in a random state a NaN stands for "none"."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        bits, other_bits = (x.flatten().view(torch.uint8) for x in (tensor, other[name]))
        assert torch.equal(bits, other_bits), name


def _view(tensor: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
