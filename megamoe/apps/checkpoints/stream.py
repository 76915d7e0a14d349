"""Checkpoints rewritten in bounded memory: a safetensors file from slabs of tensors, a folder whole or not
at all.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and
place of each tensor), and the tensors one after the other. Source:
https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.apps.checkpoints.verify import refuse_damaged
from megamoe.checkpoint.format.files import sha256, write_sums
from megamoe.checkpoint.format.reader import IN_SAFETENSORS, WEIGHT, CheckpointReader
from megamoe.errors import UserError
from megamoe.io import real, sync
from megamoe.parallel.chunks import LocalChunk, Shape, chunks_of_range

SLAB = 1 << 26  # elements that are in memory at a time
LENGTH_BYTES = 8  # before the header of a safetensors file
CONVERTING = ".converting_"  # before the name of a folder that is being written
OLD_S = 3600  # without a byte written: left by a process that was killed


@dataclass(frozen=True)
class Stored:
    """The dtype and shape of a tensor of a file."""

    dtype: torch.dtype
    shape: Shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes in the file."""
        return self.numel * self.dtype.itemsize

    def index_entry(self, shard: int = 0) -> dict[str, Any]:
        """Return what a checkpoint's index says of the tensor, which lies whole in that shard."""
        shape = list(self.shape)
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": shape, "chunks": [[shard, [0] * len(shape), shape]]}


@contextmanager
def new_folder(path: Path, source: Path) -> Iterator[Path]:
    """Yield a folder to write in. When the block has ended well, it is at `path`, with its checksums.

    What a process that was killed has left beside it is removed.

    Raises:
        UserError: if `path` exists, or lies in the checkpoint that is read.
    """
    with new_tree(path, source) as temporary:
        yield temporary
        write_sums(temporary, {file.name: sha256(file) for file in temporary.iterdir()})


@contextmanager
def new_tree(path: Path, source: Path) -> Iterator[Path]:
    """As `new_folder`, without checksums."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists; name a folder that does not")
    if real(path).is_relative_to(real(source)):
        raise UserError(f"{path} lies in {source}, which would no longer be as it was saved; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{CONVERTING}*"):
        if left.is_dir() and not left.is_symlink() and age_s(left) > OLD_S:
            shutil.rmtree(left, ignore_errors=True)
    temporary = path.with_name(f"{CONVERTING}{path.name[:40]}_{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        yield temporary
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def age_s(folder: Path) -> float:
    """Return the seconds since anything in the folder was last written."""
    times = []
    for entry in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):  # deleted meanwhile
            times.append(entry.lstat().st_mtime)
    return time.time() - max(times, default=0)


def one_rank(precision: str) -> dict[str, Any]:
    """Return what the description of a checkpoint says that one process has written just now."""
    sizes = dict.fromkeys(("ranks", "tensor", "expert", "expert_tensor"), 1)
    return {
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "layout": {**sizes, "zero_stage": 0, "precision": precision},
        "loss_scaler": {},
    }


def write_line(path: Path, text: str) -> None:
    """Write text and a newline, and flush the file to the disk."""
    path.write_text(f"{text}\n", encoding="utf-8")
    sync(path)


# Fills chunks with the elements of tensors, as `CheckpointReader.fill` does.
Fill = Callable[[Iterable[LocalChunk]], None]


@contextmanager
def tensor_writer(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write the tensors of one safetensors file, whose dtypes and shapes are known before, in any order.

    The function that it gives writes a tensor by its name, or the elements that follow those written before.
    At the end every tensor must be written. metadata: text for other programs.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    next_byte, size = dict[str, int](), 0
    # The largest items first, so that each tensor is aligned, as the safetensors library has it.
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        dtype = IN_SAFETENSORS[str(tensors[name].dtype).removeprefix("torch.")]
        next_byte[name], size = size, size + tensors[name].num_bytes
        offsets = [next_byte[name], size]
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    start = LENGTH_BYTES + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(start + size)

        def write(name: str, tensor: Tensor) -> None:
            assert tensor.dtype == tensors[name].dtype, name
            if tensor.numel():
                file.seek(start + next_byte[name])
                next_byte[name] += file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

        yield write
        ends = {name: header[name]["data_offsets"][1] for name in tensors}
        assert next_byte == ends, "a tensor is not whole"
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Stored], fill: Fill, prefix: str = "") -> None:
    """Write tensors of a checkpoint into a safetensors file, one slab in memory at a time.

    prefix: of their names in the checkpoint.
    """
    with tensor_writer(path, tensors) as write:
        for name, stored in tensors.items():
            for start in range(0, stored.numel, SLAB):
                for chunk in chunks_of_range(stored.shape, start, min(start + SLAB, stored.numel)):
                    slab = torch.empty(chunk.sizes, dtype=stored.dtype)
                    fill([LocalChunk(prefix + name, stored.shape, chunk, slab)])
                    write(name, slab)


WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def consolidate(source: Path, path: Path, dtype: str | None = None) -> None:
    """Write a folder with model.safetensors, model.json and SHA256SUMS.

    dtype: the key in DTYPES of the parameters' dtype; None: the saved one. Buffers keep the saved dtype.

    Raises:
        UserError: if the checkpoint is damaged, or `path` exists.
    """
    refuse_damaged(source)
    with CheckpointReader(source) as reader, new_folder(path, source) as folder:
        weights = {
            name.removeprefix(WEIGHT): _output_tensor(reader, name, dtype) for name in reader.names(WEIGHT)
        }
        write_tensors(folder / WEIGHTS, weights, reader.fill, WEIGHT)
        write_line(folder / DESCRIPTION, json.dumps(_description(reader, weights), indent=1))


def count_parameters(reader: CheckpointReader) -> dict[str, int]:
    """Return the number of parameters, `total`, and of those in routed experts, `experts`.

    Buffers do not count.
    """
    sizes = {
        name: math.prod(reader.shape(WEIGHT + name))
        for name in reader.index["shardings"]
        if WEIGHT + name in reader.index["tensors"]
    }
    experts = [size for name, size in sizes.items() if reader.index["shardings"][name].get("expert")]
    return {"total": sum(sizes.values()), "experts": sum(experts)}


def _output_tensor(reader: CheckpointReader, name: str, dtype: str | None) -> Stored:
    is_parameter = name.removeprefix(WEIGHT) in reader.index["shardings"]
    to_dtype = DTYPES[dtype] if dtype is not None and is_parameter else reader.dtype(name)
    return Stored(to_dtype, tuple(reader.shape(name)))


def _description(reader: CheckpointReader, weights: dict[str, Stored]) -> dict[str, Any]:
    meta = reader.meta
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "parameters": tensor.numel if name in reader.index["shardings"] else 0,
        }
        for name, tensor in sorted(weights.items())
    }
    return {
        "source": str(reader.path),
        **{key: meta[key] for key in ("step", "tokens", "saved_at", "vocabulary")},
        "parameters": count_parameters(reader),
        "tensors": tensors,
        "config": meta["config"],
    }
