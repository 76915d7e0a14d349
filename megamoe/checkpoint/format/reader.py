"""A checkpoint on the disk, read: any box of any tensor, whatever boxes it was saved in.

Which chunks a box needs is worked out by torch.distributed.checkpoint; what is read are slices of
safetensors files.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megamoe.checkpoint.format.boxes import Box, Piece, narrowed
from megamoe.checkpoint.format.files import damaged, is_plain, shard_file
from megamoe.checkpoint.format.meta import Index, read_index, read_meta
from megamoe.errors import UserError

WEIGHT = "model/"  # before a parameter's or buffer's name
STEP = "step/"  # Adam's count of a parameter's updates
MOMENTS = ("exp_avg", "exp_avg_sq")
IN_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def moment_name(moment: str, parameter: str) -> str:
    """Of the tensor that holds Adam's moment of a parameter."""
    return f"{moment}/{parameter}"


class Saved:
    """A checkpoint, opened. Its files are read when they are asked for; `close` lets go of them.

    Raises (when built):
        UserError: if its JSON is missing, damaged or of another format.
    """

    def __init__(self, path: Path, key: str = "checkpoint.resume") -> None:
        self.path = path
        self.meta = read_meta(path, key)
        self.index: Index = read_index(path)
        self._open = ExitStack()
        self._files: dict[int, Any] = {}

    def __enter__(self) -> "Saved":
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()
        self._open.close()

    def names(self, prefix: str = "") -> list[str]:
        """Of the tensors whose name begins so."""
        return [name for name in self.index["tensors"] if name.startswith(prefix)]

    def shape(self, name: str) -> list[int]:
        """Of a tensor that is there."""
        return self.index["tensors"][name]["shape"]

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is there."""
        dtype: torch.dtype = getattr(torch, self.index["tensors"][name]["dtype"])
        return dtype

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU.

        Raises:
            UserError: if a file is missing or damaged; before memory is taken for what is in none.
        """
        shape = tuple(self.shape(name))
        for number in range(len(self.index["tensors"][name]["chunks"])):
            self._chunk(name, number)
        filled = torch.empty(shape, dtype=self.dtype(name))
        self.fill([Piece(name, shape, Box((0,) * len(shape), shape), filled)])
        return filled

    @torch.no_grad()
    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy into each piece what its tensor has there, cast to the piece's dtype.

        Raises:
            UserError: if a tensor is missing or of another shape, or a file missing or damaged.
        """
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
        for name, wanted in by_name.items():
            self._check(wanted[0])
            self._fill(name, wanted)

    def _check(self, piece: Piece) -> None:
        what = piece.name.removeprefix(WEIGHT)
        if piece.name not in self.index["tensors"]:
            raise UserError(f"{self.path}: {what} is missing; the checkpoint is of another model")
        if self.shape(piece.name) != list(piece.shape):
            raise UserError(
                f"{self.path}: {what} has shape {self.shape(piece.name)}, this model needs "
                f"{list(piece.shape)}; use the configuration that saved it"
            )

    def _fill(self, name: str, wanted: list[Piece]) -> None:
        meta = self.index["tensors"][name]
        stored = TensorStorageMetadata(
            TensorProperties(dtype=self.dtype(name)),
            torch.Size(meta["shape"]),
            [_chunk(Box(tuple(offsets), tuple(sizes))) for _, offsets, sizes in meta["chunks"]],
        )
        missing = sum(piece.box.numel for piece in wanted)
        for item in create_read_items_for_chunk_list(name, stored, [_chunk(piece.box) for piece in wanted]):
            piece = wanted[item.dest_index.index or 0]
            narrowed(piece.tensor, Box(tuple(item.dest_offsets), tuple(item.lengths))).copy_(
                self._read(name, item)
            )
            missing -= item.lengths.numel()
        if missing:
            raise damaged(self.path, f"{missing} elements of {name} are in no shard")

    def _read(self, name: str, item: ReadItem) -> Tensor:
        chunk, path = self._chunk(name, item.storage_index.index or 0)
        ends = [o + length for o, length in zip(item.storage_offsets, item.lengths, strict=True)]
        try:
            part: Tensor = chunk[tuple(map(slice, item.storage_offsets, ends)) or ...]
        except (OSError, SafetensorError) as error:
            raise damaged(path, error) from None
        return part

    def _chunk(self, name: str, number: int) -> tuple[Any, Path]:
        """One of a tensor's chunks, to be sliced, and the file that has it as the index says."""
        shard, offsets, sizes = self.index["tensors"][name]["chunks"][number]
        key, dtype = self.chunk_key(name, offsets, sizes), self.index["tensors"][name]["dtype"]
        file, path = self.shard(shard), self.path / shard_file(shard)
        try:
            chunk = file.get_slice(key)
        except SafetensorError as error:
            raise damaged(path, error) from None
        found, expected = (chunk.get_dtype(), chunk.get_shape()), (IN_SAFETENSORS[dtype], list(sizes))
        if found != expected:
            raise damaged(path, f"{key} is {found[0]} {found[1]}, expected {expected[0]} {expected[1]}")
        return chunk, path

    def chunk_key(self, name: str, offsets: Iterable[int], sizes: Iterable[int]) -> str:
        """Under which a shard of this checkpoint holds a chunk of a tensor."""
        tensor = self.index["tensors"][name]
        return chunk_key(tensor.get("stored_name", name), tensor["shape"], offsets, sizes)

    def shard(self, number: int) -> Any:
        """A file of tensors, opened by safetensors.

        Raises:
            UserError: if it is missing or damaged.
        """
        path = self.path / shard_file(number)
        try:
            if number not in self._files:
                if not is_plain(path):
                    raise damaged(path, "not a plain file")
                self._files[number] = self._open.enter_context(safe_open(str(path), framework="pt"))
            return self._files[number]
        except (OSError, SafetensorError) as error:
            raise damaged(path, (isinstance(error, OSError) and error.strerror) or error) from None


def chunk_key(name: str, shape: Iterable[int], offsets: Iterable[int], sizes: Iterable[int]) -> str:
    """Under which a shard holds a box: the tensor's name where it is the whole, else with its place."""
    return name if list(shape) == list(sizes) else f"{name}@{','.join(map(str, offsets))}"


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
