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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
CONVERTING = ".converting_"  # before the name of a folder that is being written
OLD_S = 3600  # without a byte written: left by a process that was killed


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of a checkpoint that is to be written in this dtype."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes in the file."""
        return self.numel * self.dtype.itemsize


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


def write_line(path: Path, text: str) -> None:
    """Write text and a newline, and flush the file to the disk."""
    path.write_text(f"{text}\n", encoding="utf-8")
    sync(path)


# Fills chunks with the elements of tensors, as `CheckpointReader.fill` does.
Fill = Callable[[Iterable[LocalChunk]], None]


def write_tensors(path: Path, tensors: dict[str, OutputTensor], fill: Fill) -> None:
    """Write tensors of a checkpoint into a safetensors file, by key.

    One slab of them is in memory at a time.
    """
    keys = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))  # so that each is aligned
    header, at = {}, 0
    for key in keys:
        tensor = tensors[key]
        dtype = IN_SAFETENSORS[str(tensor.dtype).removeprefix("torch.")]
        place = [at, at := at + tensor.num_bytes]
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in keys:
            for slab in _slabs(tensors[key], fill):
                file.write(slab.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _slabs(tensor: OutputTensor, fill: Fill) -> Iterator[Tensor]:
    """Yield the tensor's elements in their order, at most SLAB at a time."""
    for start in range(0, tensor.numel, SLAB):
        for chunk in chunks_of_range(tensor.shape, start, min(start + SLAB, tensor.numel)):
            slab = torch.empty(chunk.sizes, dtype=tensor.dtype)
            fill([LocalChunk(tensor.name, tensor.shape, chunk, slab)])
            yield slab


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
        write_tensors(folder / WEIGHTS, weights, reader.fill)
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


def _output_tensor(reader: CheckpointReader, name: str, dtype: str | None) -> OutputTensor:
    is_parameter = name.removeprefix(WEIGHT) in reader.index["shardings"]
    to_dtype = DTYPES[dtype] if dtype is not None and is_parameter else reader.dtype(name)
    return OutputTensor(name, tuple(reader.shape(name)), to_dtype)


def _description(reader: CheckpointReader, weights: dict[str, OutputTensor]) -> dict[str, Any]:
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
