"""Checkpoints rewritten in bounded memory: a safetensors file from slabs of tensors, a folder whole or not
at all.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and
place of each tensor), and the tensors one after the other. Source:
https://huggingface.co/docs/safetensors/index#format
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megamoe.checkpoint.format.boxes import Box, Piece, boxes_of_range
from megamoe.checkpoint.format.files import sync
from megamoe.checkpoint.format.integrity import sha256, write_sums
from megamoe.checkpoint.format.reader import IN_SAFETENSORS, Saved
from megamoe.errors import UserError

SLAB = 1 << 26  # elements that are in memory at a time
CONVERTING = ".converting_"  # before the name of a folder that is being written


@dataclass(frozen=True)
class Part:
    """A box of a logical tensor, to be written in that dtype."""

    name: str
    box: Box
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """How many it takes."""
        return self.box.numel * self.dtype.itemsize


@contextmanager
def new_folder(path: Path, source: Path) -> Iterator[Path]:
    """A folder to write in, which is at `path`, with its checksums, when the block has ended well.

    Raises:
        UserError: if `path` exists, or lies in the checkpoint that is read.
    """
    if os.path.lexists(path):
        raise UserError(f"{path} exists; name a folder that does not")
    if path.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{path} lies in {source}, which would no longer be as it was saved; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{CONVERTING}{path.name}_{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        yield temporary
        write_sums(temporary, {file.name: sha256(file) for file in temporary.iterdir()})
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_line(path: Path, text: str) -> None:
    """Text and a line's end, onto the disk."""
    path.write_text(f"{text}\n", encoding="utf-8")
    sync(path)


def write_tensors(path: Path, parts: dict[str, Part], saved: Saved) -> None:
    """A safetensors file of parts of a checkpoint, by key; one slab is in memory at a time."""
    keys = sorted(parts, key=lambda key: (-parts[key].dtype.itemsize, key))  # so that each is aligned
    header, at = {}, 0
    for key in keys:
        part = parts[key]
        dtype = IN_SAFETENSORS[str(part.dtype).removeprefix("torch.")]
        place = [at, at := at + part.bytes]
        header[key] = {"dtype": dtype, "shape": list(part.box.sizes), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in keys:
            for slab in _slabs(parts[key], saved):
                file.write(slab.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _slabs(part: Part, saved: Saved) -> Iterator[Tensor]:
    """Its elements in their order."""
    shape, total = tuple(saved.shape(part.name)), part.box.numel
    for start in range(0, total, SLAB):
        for inner in boxes_of_range(part.box.sizes, start, min(start + SLAB, total)):
            offsets = tuple(a + b for a, b in zip(part.box.offsets, inner.offsets, strict=True))
            slab = torch.empty(inner.sizes, dtype=part.dtype)
            saved.fill([Piece(part.name, shape, Box(offsets, inner.sizes), slab)])
            yield slab


def whole(shape: list[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))
